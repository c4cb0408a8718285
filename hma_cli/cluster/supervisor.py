"""The launch as a state machine: events in, next state and effects out. Pure, so a test replays any history.

    starting ──all servers healthy──> routing ──router healthy──> probing ──proof──> ready
        └──────────┴── a child ends, the deadline passes, the proof fails, an interrupt ──┴──> stopping

A launch without a router goes from starting to ready. Once stopping, nothing but the children's ends counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hma_cli.cluster.process import ExitStatus
from hma_cli.cluster.readiness import Stage, stage_of

Phase = Literal["starting", "routing", "probing", "ready", "stopping"]
Effect = Literal["start_router", "run_probe", "announce", "stop_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A child's process exists."""

    name: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A child's newest log line."""

    name: str
    line: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """A child answers its health check."""

    name: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A child's process has ended."""

    name: str
    status: ExitStatus
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Somebody wants the launch to end: Ctrl-C, a signal, the end of a `with` block."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePassed:
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailed:
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passes: deadlines are looked at."""

    at: float


Event = Started | Output | Healthy | Exited | Interrupted | ProbePassed | ProbeFailed | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildState:
    """What is known of one child."""

    name: str
    router: bool = False
    stage: Stage = Stage.WAITING
    since: float = 0.0
    last_line: str = ""
    status: ExitStatus | None = None

    @property
    def healthy(self) -> bool:
        return self.stage is Stage.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The launch ends since this child ended."""

    name: str
    status: ExitStatus
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The launch ends since these children were not ready at the deadline."""

    names: tuple[str, ...]
    phase: Phase


Reason = Died | TimedOut | Literal["interrupted", "unproven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchState:
    """The whole launch. `reason` says why it stops; `was_ready` whether it ever was."""

    children: tuple[ChildState, ...]
    deadline: float
    phase: Phase = "starting"
    reason: Reason | None = None
    was_ready: bool = False

    def child(self, name: str) -> ChildState:
        return next(child for child in self.children if child.name == name)


Step = tuple[LaunchState, tuple[Effect, ...]]


def reduce(state: LaunchState, event: Event) -> Step:
    """The next state, and what the shell has to do now. Unknown children are a programming error (StopIteration)."""
    if isinstance(event, Exited):
        return _exited(state, event)
    if state.phase == "stopping":
        return state, ()
    match event:
        case Started(name=name, at=at):
            return _with(state, replace(state.child(name), stage=Stage.STARTING, since=at)), ()
        case Output(name=name, line=line, at=at):
            return _with(state, _heard(state.child(name), line, at)), ()
        case Healthy(name=name, at=at):
            return _advance(_with(state, replace(state.child(name), stage=Stage.READY, since=at)))
        case ProbePassed() if state.phase == "probing":
            return replace(state, phase="ready", was_ready=True), ("announce",)
        case ProbeFailed() if state.phase == "probing":
            return _stop(state, "unproven")
        case Interrupted():
            return _stop(state, "interrupted")
        case Tick(at=at) if state.phase != "ready" and at >= state.deadline:
            late = tuple(child.name for child in state.children if not child.healthy) or ("probe",)
            waiting = tuple(name for name in late if name == "probe" or not state.child(name).router)
            return _stop(state, TimedOut(names=waiting or late, phase=state.phase))
    return state, ()


def _exited(state: LaunchState, event: Exited) -> Step:
    state = _with(state, replace(state.child(event.name), stage=Stage.ENDED, since=event.at, status=event.status))
    if state.phase == "stopping":
        return state, ()
    return _stop(state, Died(name=event.name, status=event.status, phase=state.phase))


def _advance(state: LaunchState) -> Step:
    servers_up = all(child.healthy for child in state.children if not child.router)
    has_router = any(child.router for child in state.children)
    if state.phase == "starting" and servers_up and not has_router:
        return replace(state, phase="ready", was_ready=True), ("announce",)
    if state.phase == "starting" and servers_up:
        return replace(state, phase="routing"), ("start_router",)
    if state.phase == "routing" and all(child.healthy for child in state.children):
        return replace(state, phase="probing"), ("run_probe",)
    return state, ()


def _heard(child: ChildState, line: str, at: float) -> ChildState:
    stage = stage_of(line)
    # Stages only go forward: both processes of a server may log the same step, one of them late.
    if stage is not None and child.stage < stage < Stage.READY:
        return replace(child, stage=stage, since=at, last_line=line)
    return replace(child, last_line=line)


def _stop(state: LaunchState, reason: Reason) -> Step:
    return replace(state, phase="stopping", reason=reason), ("stop_all",)


def _with(state: LaunchState, child: ChildState) -> LaunchState:
    return replace(state, children=tuple(child if old.name == child.name else old for old in state.children))
