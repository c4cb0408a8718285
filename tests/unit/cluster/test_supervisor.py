"""Recorded histories of launches, replayed through the reducer."""

from __future__ import annotations

import pytest

from hma_cli.cluster.process import ExitStatus
from hma_cli.cluster.readiness import Stage
from hma_cli.cluster.supervisor import (
    ChildState,
    Died,
    Effect,
    Event,
    Exited,
    Healthy,
    Interrupted,
    LaunchState,
    Output,
    ProbeFailed,
    ProbePassed,
    Started,
    Tick,
    TimedOut,
    reduce,
)

P, D, R = "prefill-0", "decode-0", "router"
PAIR = LaunchState(children=(ChildState(name=P), ChildState(name=D), ChildState(name=R, router=True)), deadline=100.0)
ENGINE = LaunchState(children=(ChildState(name="engine"),), deadline=100.0)
SERVERS_STARTED: tuple[Event, ...] = (Started(name=P, at=0.0), Started(name=D, at=0.1))
SERVERS_UP: tuple[Event, ...] = (*SERVERS_STARTED, Healthy(name=D, at=80.0), Healthy(name=P, at=81.0))
ROUTER_UP: tuple[Event, ...] = (*SERVERS_UP, Started(name=R, at=81.1), Healthy(name=R, at=82.0))
READY: tuple[Event, ...] = (*ROUTER_UP, ProbePassed(at=83.0))
KILLED = ExitStatus(signal=9)


def replay(state: LaunchState, events: tuple[Event, ...]) -> tuple[LaunchState, list[Effect]]:
    effects: list[Effect] = []
    for event in events:
        state, more = reduce(state, event)
        effects += more
    return state, effects


def test_a_good_launch_starts_the_router_then_probes_then_announces() -> None:
    state, effects = replay(PAIR, READY)
    assert effects == ["start_router", "run_probe", "announce"]
    assert state.phase == "ready"
    assert state.was_ready


def test_the_router_waits_for_every_server() -> None:
    state, effects = replay(PAIR, (*SERVERS_STARTED, Healthy(name=P, at=50.0)))
    assert (state.phase, effects) == ("starting", [])


def test_nothing_is_announced_before_the_probe_has_passed() -> None:
    state, effects = replay(PAIR, ROUTER_UP)
    assert state.phase == "probing"
    assert "announce" not in effects
    assert not state.was_ready


def test_a_failed_probe_stops_everything() -> None:
    state, effects = replay(PAIR, (*ROUTER_UP, ProbeFailed(at=90.0)))
    assert effects[-1] == "stop_all"
    assert state.reason == "unproven"


def test_an_engine_without_router_is_ready_when_it_is_healthy() -> None:
    state, effects = replay(ENGINE, (Started(name="engine", at=0.0), Healthy(name="engine", at=30.0)))
    assert (state.phase, effects) == ("ready", ["announce"])


@pytest.mark.parametrize(
    ("history", "phase"),
    [(SERVERS_STARTED, "starting"), (SERVERS_UP, "routing"), (ROUTER_UP, "probing"), (READY, "ready")],
)
@pytest.mark.parametrize("victim", [P, D])
def test_any_childs_death_stops_all_and_is_remembered(history: tuple[Event, ...], phase: str, victim: str) -> None:
    state, effects = replay(PAIR, (*history, Exited(name=victim, status=KILLED, at=85.0)))
    assert effects[-1] == "stop_all"
    assert state.reason == Died(name=victim, status=KILLED, phase=phase)  # type: ignore[arg-type]
    assert state.child(victim).stage is Stage.ENDED


def test_the_first_death_is_the_reason_and_stop_is_ordered_once() -> None:
    history = (*READY, Exited(name=D, status=KILLED, at=90.0), Exited(name=P, status=ExitStatus(code=0), at=91.0))
    state, effects = replay(PAIR, history)
    assert isinstance(state.reason, Died)
    assert state.reason.name == D
    assert effects.count("stop_all") == 1
    assert state.child(P).status == ExitStatus(code=0)


@pytest.mark.parametrize("history", [(), SERVERS_STARTED, SERVERS_UP, ROUTER_UP, READY])
def test_an_interrupt_stops_in_every_phase(history: tuple[Event, ...]) -> None:
    state, effects = replay(PAIR, (*history, Interrupted(at=99.0)))
    assert state.reason == "interrupted"
    assert effects[-1] == "stop_all"
    assert state.was_ready is (history == READY)


def test_while_stopping_only_deaths_are_noted() -> None:
    late = (Healthy(name=P, at=1.0), ProbePassed(at=2.0), Interrupted(at=3.0), Tick(at=1000.0))
    stopping, _ = replay(PAIR, (*SERVERS_STARTED, Interrupted(at=0.5)))
    assert replay(stopping, late) == (stopping, [])


@pytest.mark.parametrize(
    ("history", "names"),
    [
        (SERVERS_STARTED, (P, D)),
        ((*SERVERS_STARTED, Healthy(name=P, at=50.0)), (D,)),
        (SERVERS_UP, (R,)),
        (ROUTER_UP, ("probe",)),
    ],
)
def test_the_deadline_names_what_was_late(history: tuple[Event, ...], names: tuple[str, ...]) -> None:
    state, effects = replay(PAIR, (*history, Tick(at=99.9)))
    assert "stop_all" not in effects
    state, effects = replay(state, (Tick(at=100.0),))
    assert effects == ["stop_all"]
    assert isinstance(state.reason, TimedOut)
    assert state.reason.names == names


def test_a_ready_pair_has_no_deadline() -> None:
    state, effects = replay(PAIR, (*READY, Tick(at=1e6)))
    assert state.phase == "ready"
    assert "stop_all" not in effects


def test_stages_only_go_forward_and_the_last_line_is_kept() -> None:
    lines = ("Starting to load model x...", "Resolved architecture: Y", "Application startup complete.", "GET /health")
    state, _ = replay(
        PAIR, (*SERVERS_STARTED, *(Output(name=P, line=line, at=10.0 + i) for i, line in enumerate(lines)))
    )
    child = state.child(P)
    assert (child.stage, child.since, child.last_line) == (Stage.SERVING, 12.0, "GET /health")


def test_a_log_line_alone_never_makes_a_server_ready() -> None:
    state, effects = replay(PAIR, (*SERVERS_STARTED, Output(name=P, line="Application startup complete.", at=5.0)))
    assert not state.child(P).healthy
    assert effects == []
