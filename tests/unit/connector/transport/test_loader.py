"""Loads: bytes that land where the plan says, and one report each, after all reads have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import TransportError
from connector.plan.build import Pairs
from connector.plan.geometry import Geometry, Group, Indices, Page, Region, Strip
from connector.plan.kinds import Full
from connector.transport.base import Progress, Telemetry, Transport
from connector.transport.loader import Load, Loader, Outcome, PeerMemory, RankMemory
from connector.transport.loopback import LoopbackTransport
from connector.transport.parts import Recovery
from tests.unit.connector.describe import PAGE, small_geometry

CANARY = 0xA5
STRIDE = 96  # pages of 64 bytes with 32 bytes of canary between them


class Arena:
    """Real memory for two regions; block b of region r is filled with a value of its own."""

    def __init__(self, seed: int, num_blocks: int = 20) -> None:
        self.memory = np.full((2, num_blocks, STRIDE), CANARY, np.uint8)
        for region in range(2):
            for block in range(num_blocks):
                self.memory[region, block, :PAGE] = (seed + region * 50 + block) % 256
        regions = tuple(
            Region(base=int(self.memory[index].ctypes.data), stride=STRIDE, block_bytes=PAGE, num_blocks=num_blocks)
            for index in range(2)
        )
        groups = (
            Group(kind=Full(), block_size=16, layers=("a", "b"), pages=(Page(0, 0, PAGE), Page(1, 0, PAGE))),
            Group(kind=Full(), block_size=16, layers=("c",), pages=(Page(0, 0, PAGE),)),
        )
        self.geometry = Geometry(regions, groups)


def load(
    request_id: str = "r",
    *,
    valid_until: float = 100.0,
    deadline: float = math.inf,
    pairs: Sequence[tuple[int, int]] = ((3, 5),),
) -> Load:
    made = tuple(
        Pairs(np.array([remote for remote, _ in group], np.int64), np.array([local for _, local in group], np.int64))
        for group in (list(pairs), [])
    )
    return Load(request_id=request_id, epoch="P", pairs=made, valid_until=valid_until, deadline=deadline)


@given(
    st.permutations(range(1, 20)),
    st.permutations(range(1, 20)),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 4),
)
@settings(max_examples=50, deadline=None)
def test_exactly_the_planned_pages_change(
    remote: list[int], local: list[int], first: int, second: int, max_runs: int
) -> None:
    ours, theirs = Arena(0), Arena(100)
    mine, other = LoopbackTransport(), LoopbackTransport()
    connection = other.register(theirs.geometry.regions)
    mine.register(ours.geometry.regions)
    loader = Loader(mine, ours.geometry, max_runs=max_runs, clock=lambda: 0.0)
    loader.connect("P", PeerMemory((RankMemory(connection=connection, geometry=theirs.geometry),)))
    cut = first + second
    pairs = (
        Pairs(np.array(remote[:first], np.int64), np.array(local[:first], np.int64)),
        Pairs(np.array(remote[first:cut], np.int64), np.array(local[first:cut], np.int64)),
    )
    expected = ours.memory.copy()
    for region, upto in ((0, cut), (1, first)):
        for there, here in zip(remote[:upto], local[:upto], strict=True):
            expected[region, here, :PAGE] = theirs.memory[region, there, :PAGE]
    loader.start(Load(request_id="r", epoch="P", pairs=pairs, valid_until=1.0))
    (outcome,) = loader.poll()
    assert outcome.ok
    assert outcome.bytes_moved == outcome.bytes_planned == (2 * first + second) * PAGE
    assert (ours.memory == expected).all()
    loader.close()
    other.close()
    mine.close()


class FakeTransport:
    """Scripted: `script[n]` says how the n-th posted read goes, state by state; the last state stays."""

    kind, memory = "fake", "DRAM"

    def __init__(self, *scripts: str) -> None:
        self.scripts = list(scripts)
        self.posted = 0
        self.reads: list[FakeRead] = []
        self.cancellable = True
        self.closed = 0
        self.telemetry_bytes: int | None = None

    def register(self, _regions: Sequence[Region]) -> bytes:
        return b""

    def connect(self, _data: bytes, _local: Sequence[Strip], _remote: Sequence[Strip]) -> FakeTransport:
        return self

    def read(self, local: Indices, _remote: Indices) -> FakeRead:
        script = self.scripts[self.posted] if self.posted < len(self.scripts) else "done"
        self.posted += 1
        if script == "refuse":
            raise TransportError("not posted")
        made = FakeRead(self, script.split(), len(local))
        self.reads.append(made)
        return made

    def close(self) -> None:
        self.closed += 1


class FakeRead:
    def __init__(self, owner: FakeTransport, states: list[str], rows: int) -> None:
        self.owner, self.states, self.rows = owner, states, rows
        self.ended = False

    def poll(self) -> Progress:
        assert not self.ended, "a read that was closed is polled"
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return Progress(state)

    def telemetry(self) -> Telemetry:
        size = self.rows * PAGE if self.owner.telemetry_bytes is None else self.owner.telemetry_bytes
        return Telemetry(num_bytes=size, descriptors=1, post_seconds=0.1, transfer_seconds=0.2)

    def close(self) -> bool:
        if self.states[0] == "pending" and not self.owner.cancellable:
            return False
        self.ended = True
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fake_loader(transport: Transport, clock: Clock | None = None, *, max_runs: int = 1024, **recovery: float) -> Loader:
    """A loader that repeats at once unless told otherwise."""
    geometry = small_geometry()
    made = Recovery(**({"backoff": 0.0} | recovery))  # type: ignore[arg-type]
    loader = Loader(transport, geometry, clock=clock or Clock(), max_runs=max_runs, recovery=made)
    loader.connect("P", PeerMemory((RankMemory(connection=b"", geometry=geometry),)))
    return loader


def three_parts() -> Load:
    """Three pages that do not merge: with max_runs=1 three parts."""
    return load(pairs=((1, 9), (3, 7), (5, 5)))


def ended(loader: Loader, polls: int = 10) -> list[Outcome]:
    return [outcome for _ in range(polls) for outcome in loader.poll()]


def test_a_failed_part_is_posted_again_alone() -> None:
    transport = FakeTransport("done", "failed", "done")
    loader = fake_loader(transport, max_runs=1)
    loader.start(three_parts())
    (outcome,) = ended(loader)
    assert outcome.ok
    assert (outcome.retries, transport.posted) == (1, 4)
    assert outcome.bytes_moved == outcome.bytes_planned == 3 * PAGE


@pytest.mark.parametrize("how", ["failed", "refuse"])
def test_retries_are_bounded(how: str) -> None:
    transport = FakeTransport(*[how] * 50)
    loader = fake_loader(transport, max_runs=1, max_attempts=3)
    loader.start(load())
    (outcome,) = ended(loader)
    assert outcome.reason == "transfer"
    assert transport.posted == 3


def test_a_load_is_not_reported_while_a_sibling_still_writes() -> None:
    transport = FakeTransport("failed", "pending pending pending pending done")
    transport.cancellable = False
    loader = fake_loader(transport, max_runs=1, max_attempts=1)
    loader.start(load(pairs=((1, 9), (3, 7))))
    assert loader.poll() == []
    assert loader.poll() == []
    (outcome,) = ended(loader)
    assert outcome.reason == "transfer"
    assert all(read.ended for read in transport.reads)


def test_a_lease_that_ends_during_a_read_ends_the_load_after_the_read() -> None:
    clock, transport = Clock(), FakeTransport("pending")
    loader = fake_loader(transport, clock)
    loader.start(load(valid_until=5.0))
    assert loader.poll() == []
    clock.now = 5.0
    (outcome,) = ended(loader)
    assert outcome.reason == "lease"
    assert transport.reads[0].ended


def test_a_renewal_keeps_a_load_and_a_lost_claim_ends_it() -> None:
    clock, transport = Clock(), FakeTransport("pending")
    loader = fake_loader(transport, clock)
    loader.start(load(valid_until=5.0))
    loader.extend("r", 50.0)
    clock.now = 40.0
    assert loader.poll() == []
    loader.extend("r", 0.0)
    assert [outcome.reason for outcome in ended(loader)] == ["lease"]


def test_bytes_that_landed_after_the_lease_do_not_count() -> None:
    clock, transport = Clock(), FakeTransport("pending done")
    loader = fake_loader(transport, clock)
    loader.start(load(valid_until=5.0))
    assert loader.poll() == []
    clock.now = 6.0
    assert [outcome.reason for outcome in ended(loader)] == ["lease"]


def test_a_load_ends_at_its_deadline_however_long_its_claim_is_renewed() -> None:
    clock, transport = Clock(), FakeTransport(*["pending"] * 9)
    loader = fake_loader(transport, clock, read_timeout=4.0, max_attempts=9)
    loader.start(load(deadline=10.0))
    for clock.now in (3.0, 6.0, 9.0):
        loader.extend("r", clock.now + 30.0)
        assert loader.poll() == []
    clock.now = 10.0
    (outcome,) = ended(loader)
    assert outcome.reason == "load_timeout"
    assert all(read.ended for read in transport.reads)


def test_bytes_that_landed_after_the_deadline_do_not_count() -> None:
    clock, transport = Clock(), FakeTransport("pending done")
    loader = fake_loader(transport, clock)
    loader.start(load(deadline=5.0))
    assert loader.poll() == []
    clock.now = 6.0
    assert [outcome.reason for outcome in ended(loader)] == ["load_timeout"]


@pytest.mark.parametrize(("valid_until", "deadline", "reason"), [(5.0, math.inf, "lease"), (5.0, 4.0, "load_timeout")])
def test_a_load_that_reaches_the_worker_too_late_is_not_started(
    valid_until: float, deadline: float, reason: str
) -> None:
    clock, transport = Clock(), FakeTransport()
    loader = fake_loader(transport, clock)
    clock.now = 5.0
    loader.start(load(valid_until=valid_until, deadline=deadline))
    assert [outcome.reason for outcome in ended(loader)] == [reason]
    assert transport.posted == 0


def test_a_cancelled_load_posts_nothing_more_and_is_reported_once_it_is_quiet() -> None:
    transport = FakeTransport("failed", "pending pending pending done")
    transport.cancellable = False
    loader = fake_loader(transport, max_runs=1)
    loader.start(load(pairs=((1, 9), (3, 7))))
    loader.cancel("r")
    loader.cancel("unknown")
    assert loader.poll() == []
    assert [outcome.reason for outcome in ended(loader)] == ["cancelled"]
    assert transport.posted == 2


def test_another_number_of_bytes_than_planned_is_a_failure() -> None:
    transport = FakeTransport("done")
    transport.telemetry_bytes = PAGE - 1
    loader = fake_loader(transport)
    loader.start(load())
    assert [outcome.reason for outcome in ended(loader)] == ["bytes"]


def test_a_peer_is_dropped_when_its_reads_have_ended_and_can_come_back() -> None:
    transport = FakeTransport("pending pending done", "done", "done")
    loader = fake_loader(transport)
    loader.start(load("one"))
    loader.forget("P")
    assert transport.closed == 0
    assert [outcome.ok for outcome in ended(loader)] == [True]
    assert transport.closed == 1
    loader.start(load("two"))
    assert [outcome.reason for outcome in ended(loader)] == ["transfer"]
    loader.connect("P", PeerMemory((RankMemory(connection=b"", geometry=small_geometry()),)))
    loader.start(load("three"))
    assert [outcome.ok for outcome in ended(loader)] == [True]


def test_a_peer_that_is_forgotten_and_described_again_while_it_is_read_stays() -> None:
    transport = FakeTransport("pending pending done", "done")
    loader = fake_loader(transport)
    loader.start(load("one"))
    loader.forget("P")
    loader.connect("P", PeerMemory((RankMemory(connection=b"", geometry=small_geometry()),)))
    assert [outcome.ok for outcome in ended(loader)] == [True]
    assert transport.closed == 0


def test_an_empty_plan_succeeds_with_nothing_moved() -> None:
    loader = fake_loader(FakeTransport())
    loader.start(load(pairs=()))
    assert [(outcome.ok, outcome.bytes_moved) for outcome in ended(loader)] == [(True, 0)]


@given(
    st.lists(st.sampled_from(["done", "failed", "pending done", "pending failed", "refuse"]), max_size=12),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["cancel", "extend", "lose", "forget"])), max_size=4),
)
@settings(max_examples=200)
def test_whatever_happens_each_load_is_reported_once_and_no_read_outlives_it(
    scripts: list[str], events: list[tuple[int, str]]
) -> None:
    clock, transport = Clock(), FakeTransport(*scripts)
    loader = fake_loader(transport, clock, max_runs=1)
    names = ["a", "b"]
    for name in names:
        loader.start(load(name, pairs=((1, 9), (3, 7), (5, 5))))
    reports: list[str] = []
    for step in range(40):
        for at, event in events:
            if at == step:
                actions = {
                    "cancel": lambda: loader.cancel("a"),
                    "extend": lambda: loader.extend("a", 200.0),
                    "lose": lambda: loader.extend("b", 0.0),
                    "forget": lambda: loader.forget("P"),
                }
                actions[event]()
        reports += [outcome.request_id for outcome in loader.poll()]
    assert sorted(reports) == names
    assert all(read.ended for read in transport.reads)
    assert len(loader) == 0


def test_a_failed_part_waits_longer_each_time() -> None:
    clock, transport = Clock(), FakeTransport(*["failed"] * 4)
    loader = fake_loader(transport, clock, backoff=0.5, max_backoff=1.5, max_attempts=4)
    loader.start(load())
    posted = []
    for step in range(40):
        clock.now = step / 4
        loader.poll()
        posted.append(transport.posted)
    # Each failure is seen one look (0.25 s) after its post; then 0.5, 1 and 1.5 seconds pass. After four the load ends.
    assert [posted.index(count) / 4 for count in (1, 2, 3, 4)] == [0.0, 0.5, 1.75, 3.5]
    assert transport.posted == 4


def test_a_read_that_never_ends_is_cancelled_and_posted_again() -> None:
    clock, transport = Clock(), FakeTransport("pending", "done")
    loader = fake_loader(transport, clock, read_timeout=5.0)
    loader.start(load())
    clock.now = 4.9
    assert loader.poll() == []
    clock.now = 5.0
    (outcome,) = ended(loader)
    assert outcome.ok
    assert (outcome.failures, outcome.retries, outcome.rows_again) == ({"timeout": 1}, 1, 1)


def test_a_read_that_can_be_neither_ended_nor_cancelled_is_awaited() -> None:
    clock, transport = Clock(), FakeTransport("pending pending pending pending pending failed", "done")
    transport.cancellable = False
    loader = fake_loader(transport, clock, read_timeout=1.0)
    loader.start(load())
    clock.now = 2.0
    assert loader.poll() == []
    assert transport.posted == 1
    (outcome,) = ended(loader)
    assert outcome.ok
    assert transport.posted == 2


def test_a_connection_that_failed_is_renewed_once_nothing_uses_it() -> None:
    transport = FakeTransport("failed", "done", "done")
    loader = fake_loader(transport, max_runs=1)
    loader.start(load(pairs=((1, 9), (3, 7))))
    (outcome,) = ended(loader)
    assert outcome.ok
    assert transport.closed == 1


def test_a_connection_that_others_read_over_is_left_alone() -> None:
    transport = FakeTransport("failed", "pending pending pending done", "done")
    loader = fake_loader(transport, max_runs=1)
    loader.start(load(pairs=((1, 9), (3, 7))))
    (outcome,) = ended(loader)
    assert outcome.ok
    assert transport.closed == 0
