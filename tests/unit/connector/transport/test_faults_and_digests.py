"""Faults are drawn by a seed and counted; digests find every byte that is wrong, and only its page moves again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError, TransportError
from connector.plan.build import Pairs, descriptors
from connector.plan.geometry import Geometry, Group, Page, Region, Share
from connector.plan.join import join
from connector.plan.kinds import Full, SlidingWindow
from connector.transport.base import Progress
from connector.transport.digests import DIGEST_BYTES, cut_out, differing_rows, published
from connector.transport.faulty import Faults, FaultyTransport
from connector.transport.loader import Load, Loader, Outcome, PeerMemory, RankMemory
from connector.transport.loopback import LoopbackTransport
from connector.transport.parts import Recovery

PAGE, BLOCKS = 256, 12


class Engine:
    """Two groups over two regions in real memory; `outermost` lays the layers of a block side by side."""

    def __init__(self, seed: int, *, outermost: bool = False) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, 2 * BLOCKS * PAGE, np.uint8)
        base = int(self.memory.ctypes.data)
        if outermost:
            regions = (Region(base=base, stride=2 * PAGE, block_bytes=2 * PAGE, num_blocks=BLOCKS),)
            pages = (Page(0, 0, PAGE), Page(0, PAGE, PAGE))
        else:
            regions = tuple(
                Region(base=base + index * BLOCKS * PAGE, stride=PAGE, block_bytes=PAGE, num_blocks=BLOCKS)
                for index in range(2)
            )
            pages = (Page(0, 0, PAGE), Page(1, 0, PAGE))
        groups = (
            Group(kind=Full(), block_size=16, layers=("a", "b"), pages=pages),
            Group(kind=SlidingWindow(20), block_size=16, layers=("c",), pages=pages[:1]),
        )
        self.geometry = Geometry(regions, groups)
        self.transport = LoopbackTransport()
        self.data = self.transport.register(regions)


PAIRS = (
    Pairs(np.array([1, 2, 7]), np.array([4, 5, 3])),
    Pairs(np.array([9, 8]), np.array([10, 11])),
)


@pytest.fixture(params=[False, True], ids=["layer compact", "block outermost"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    p, d = Engine(1, outermost=request.param), Engine(2, outermost=request.param)
    yield p, d
    p.transport.close()
    d.transport.close()


def run(p: Engine, d: Engine, faults: str, *, verify: bool = True, max_runs: int = 1, steps: int = 400) -> Outcome:
    """One load of PAIRS through a transport with these faults, its digests checked."""
    clock = (tick * 0.05 for tick in itertools.count())
    transport = FaultyTransport(d.transport, Faults.parse(faults), clock=lambda: next(clock))
    loader = Loader(
        transport,
        d.geometry,
        max_runs=max_runs,
        recovery=Recovery(backoff=0.1, read_timeout=2.0, max_attempts=6),
        clock=lambda: next(clock),
    )
    loader.connect("P", PeerMemory((RankMemory(connection=p.data, geometry=p.geometry),)))
    digests = published(p.geometry, [pair.remote.tolist() for pair in PAIRS]) if verify else ()
    loader.start(Load(request_id="r", epoch="P", pairs=PAIRS, valid_until=1e6, digests=digests))
    for _ in range(steps):
        for outcome in loader.poll():
            loader.close()
            assert sum(transport.injected.values()) > 0 or not faults, "no fault has happened"
            return outcome
    raise AssertionError("the load has not ended")


def arrived(p: Engine, d: Engine) -> bool:
    joined = join(d.geometry, [p.geometry])[0]
    digests = published(p.geometry, [pair.remote.tolist() for pair in PAIRS])
    return len(differing_rows(joined, PAIRS, digests)[0]) == 0


def test_a_sound_load_has_the_digests_that_were_published(engines: tuple[Engine, Engine]) -> None:
    outcome = run(*engines, "")
    assert outcome.ok
    assert (outcome.retries, outcome.bytes_again) == (0, 0)
    assert arrived(*engines)


@pytest.mark.parametrize("faults", ["corrupt:1,limit:1", "corrupt:1,limit:2"])
def test_a_corrupted_page_is_found_and_moves_again_alone(engines: tuple[Engine, Engine], faults: str) -> None:
    outcome = run(*engines, faults)
    assert outcome.ok
    assert outcome.failures["digest"] >= 1
    assert 0 < outcome.bytes_again < outcome.bytes_moved == outcome.bytes_planned
    assert arrived(*engines)


def test_without_digests_the_same_corruption_passes(engines: tuple[Engine, Engine]) -> None:
    """The planted fault is real: this is what verify_pages is for."""
    outcome = run(*engines, "corrupt:1,limit:2", verify=False)
    assert outcome.ok
    assert not arrived(*engines)


def test_pages_that_never_arrive_intact_fail_the_load(engines: tuple[Engine, Engine]) -> None:
    outcome = run(*engines, "corrupt:1")
    assert outcome.reason == "digest"


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ("refuse:1,limit:3", "refused"),
        ("fail:1,limit:3", "failed"),
        ("hang:1,limit:2", "timeout"),
        ("refuse:0.3,fail:0.3,hang:0.1,corrupt:0.1,seed:5,limit:6", "failed"),
    ],
)
def test_what_goes_wrong_for_a_while_is_mended_and_counted(
    engines: tuple[Engine, Engine], faults: str, kind: str
) -> None:
    outcome = run(*engines, faults)
    assert outcome.ok
    assert outcome.failures[kind] >= 1
    assert outcome.retries >= 1
    assert arrived(*engines)


def test_a_late_read_is_only_late(engines: tuple[Engine, Engine]) -> None:
    outcome = run(*engines, "late:1:0.5")
    assert outcome.ok
    assert outcome.failures == {}


@pytest.mark.parametrize(
    ("faults", "reason"), [("refuse:1", "transfer"), ("fail:1", "transfer"), ("hang:1", "transfer")]
)
def test_what_goes_wrong_for_ever_fails_the_load(engines: tuple[Engine, Engine], faults: str, reason: str) -> None:
    outcome = run(*engines, faults)
    assert outcome.reason == reason


@given(st.integers(0, BLOCKS - 1), st.integers(0, 2 * PAGE - 1), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_one_changed_byte_is_found_wherever_it_lies(block: int, byte: int, change: int) -> None:
    p, d = Engine(1), Engine(2)
    joined = join(d.geometry, [p.geometry])[0]
    digests = published(p.geometry, [pair.remote.tolist() for pair in PAIRS])
    rows = descriptors(PAIRS, joined)
    read = d.transport.connect(p.data, joined.local_strips, joined.remote_strips).read(rows.local, rows.remote)
    assert read.poll() is Progress.DONE
    region, within = divmod(byte, PAGE)
    d.memory[(region * BLOCKS + block) * PAGE + within] ^= change
    local, _ = differing_rows(joined, PAIRS, digests)
    moved = {(0, 4), (0, 5), (0, 3), (1, 4), (1, 5), (1, 3), (0, 10), (0, 11)}
    expected = [region * BLOCKS + block] if (region, block) in moved else []
    assert local.tolist() == expected
    p.transport.close()
    d.transport.close()


def test_digests_of_another_number_of_pages_are_refused() -> None:
    p, d = Engine(1), Engine(2)
    joined = join(d.geometry, [p.geometry])[0]
    good = published(p.geometry, [pair.remote.tolist() for pair in PAIRS])
    with pytest.raises(ConfigError, match="bytes of digests"):
        differing_rows(joined, PAIRS, (good[0][:-1], good[1]))
    assert cut_out(good[0], 2, 1, 3) == good[0][2 * DIGEST_BYTES :]


def test_pages_that_are_cut_on_their_way_are_not_verified() -> None:
    both = Region(base=0, stride=64, block_bytes=64, num_blocks=4)
    half = Region(base=0, stride=32, block_bytes=32, num_blocks=4)

    def geometry(region: Region, share: Share, block_size: int) -> Geometry:
        page = Page(0, 0, region.block_bytes)
        return Geometry(
            (region,), (Group(kind=Full(), block_size=block_size, layers=("a",), pages=(page,), share=share),)
        )

    joined = join(geometry(both, Share(), 16), [geometry(half, Share(), 8)])[0]
    with pytest.raises(ConfigError, match="are cut"):
        differing_rows(joined, [Pairs(np.array([1]), np.array([1]))], [bytes(DIGEST_BYTES)])


@pytest.mark.parametrize(
    ("text", "draws"),
    [
        ("refuse:1", {"refuse"}),
        ("fail:0.5,hang:0.5", {"fail", "hang"}),
        ("", {""}),
        (" late:0.5:2 , seed:3 ", {"late", ""}),
    ],
)
def test_a_schedule_is_drawn_by_its_seed(text: str, draws: set[str]) -> None:
    one, other = Faults.parse(text), Faults.parse(text)
    drawn = [one.draw(number) for number in range(200)]
    assert drawn == [other.draw(number) for number in range(200)]
    assert set(drawn) == draws


@pytest.mark.parametrize(
    "text",
    [
        *("fial:1", "refuse", "refuse:2", "refuse:-1", "refuse:x", "late:0.5", "late:0.5:-1", "hang:nan", "seed:x"),
        *("limit:-1", "refuse:0.6,fail:0.6", "refuse:1:2"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Faults.parse(text)


def test_faults_stop_at_their_limit_and_a_refused_post_is_a_transport_error(engines: tuple[Engine, Engine]) -> None:
    p, d = engines
    seen: list[str] = []
    transport = FaultyTransport(d.transport, Faults.parse("refuse:1,limit:2"), on_fault=seen.append)
    joined = join(d.geometry, [p.geometry])[0]
    connection = transport.connect(p.data, joined.local_strips, joined.remote_strips)
    rows = descriptors(PAIRS, joined)
    for _ in range(2):
        with pytest.raises(TransportError, match="planned fault"):
            connection.read(rows.local, rows.remote)
    assert connection.read(rows.local, rows.remote).poll() is Progress.DONE
    assert seen == ["refuse", "refuse"]
