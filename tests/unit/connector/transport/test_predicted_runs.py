"""Real NIXL between two processes: it posts exactly as many descriptors as the plan has runs, whatever the layout."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from connector.plan.build import Pairs, descriptors
from connector.plan.geometry import Geometry, Group, Page, Region, Share
from connector.plan.join import join
from connector.plan.kinds import Full, Kind, SlidingWindow, State
from connector.transport.base import Progress
from connector.transport.nixl import NixlTransport

NUM_BLOCKS = 48
PAGE = 4096
ARENA = 4 * NUM_BLOCKS * PAGE
Ids = tuple[Sequence[int], Sequence[int]]
"""P's and D's blocks of one group, by position."""


def whole(memory: np.ndarray) -> Region:
    return Region(base=int(memory.ctypes.data), stride=ARENA, block_bytes=ARENA, num_blocks=1)


def serve(pipe: Connection) -> None:
    """The other process: register an arena of random bytes, until told to end."""
    memory = np.random.default_rng(7).integers(0, 256, ARENA, np.uint8)
    transport = NixlTransport("DRAM")
    pipe.send((transport.register([whole(memory)]), int(memory.ctypes.data), memory.tobytes()))
    pipe.recv()
    transport.close()


@dataclass(frozen=True)
class Pair:
    transport: NixlTransport
    memory: np.ndarray
    peer: bytes
    peer_base: int
    peer_bytes: np.ndarray


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    spawn: Any = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    process = spawn.Process(target=serve, args=(far,))
    process.start()
    assert near.poll(60)
    peer, base, content = near.recv()
    memory = np.zeros(ARENA, np.uint8)
    transport = NixlTransport("DRAM")
    transport.register([whole(memory)])
    yield Pair(transport, memory, peer, base, np.frombuffer(content, np.uint8))
    near.send("end")
    transport.close()
    process.join(20)
    assert process.exitcode == 0


def group(kind: Kind, *pages: Page, share: Share | None = None) -> Group:
    return Group(kind=kind, block_size=16, layers=("a",), pages=pages, share=share or Share())


def regions(base: int, count: int, stride: int = PAGE) -> tuple[Region, ...]:
    return tuple(
        Region(base=base + index * NUM_BLOCKS * stride, stride=stride, block_bytes=stride, num_blocks=NUM_BLOCKS)
        for index in range(count)
    )


def layer_compact(base: int) -> Geometry:
    """Two groups that share two regions; the second is one layer short."""
    groups = (group(Full(), Page(0, 0, PAGE), Page(1, 0, PAGE)), group(SlidingWindow(40), Page(0, 0, PAGE)))
    return Geometry(regions(base, 2), groups)


def split(base: int) -> Geometry:
    """K and V in regions of their own."""
    halves = [Page(index, 0, PAGE // 2) for index in range(4)]
    return Geometry(regions(base, 4, PAGE // 2), (group(Full(), *halves), group(SlidingWindow(40), *halves[:2])))


def block_outermost(base: int) -> Geometry:
    """Two layers one after another in each block."""
    region = Region(base=base, stride=2 * PAGE, block_bytes=2 * PAGE, num_blocks=NUM_BLOCKS)
    pages = (Page(0, 0, PAGE), Page(0, PAGE, PAGE))
    return Geometry((region,), (group(Full(), *pages), group(SlidingWindow(40), pages[0])))


def with_states(base: int) -> Geometry:
    """Attention beside a state that leaves the end of its page unused."""
    return Geometry(regions(base, 1), (group(Full(), Page(0, 0, PAGE)), group(State(), Page(0, 0, PAGE - 512))))


def half_heads(base: int) -> Geometry:
    """One of two ranks: half of the heads, half as large pages."""
    page = group(Full(), Page(0, 0, PAGE // 2), share=Share(0, 1, 2))
    return Geometry(
        regions(base, 1, PAGE // 2), (page, group(SlidingWindow(40), Page(0, 0, PAGE // 2), share=Share(0, 1, 2)))
    )


def all_heads(base: int) -> Geometry:
    """Both heads in one page."""
    share = Share(0, 2, 2)
    return Geometry(
        regions(base, 1),
        (group(Full(), Page(0, 0, PAGE), share=share), group(SlidingWindow(40), Page(0, 0, PAGE), share=share)),
    )


def pools() -> dict[str, tuple[Ids, Ids]]:
    rng = np.random.default_rng(3)
    mixed = [(1 + rng.permutation(NUM_BLOCKS - 1)).tolist() for _ in range(2)]
    return {
        "fresh": ((range(1, 21), range(1, 21)), (range(21, 24), range(21, 24))),
        "descending": ((range(30, 10, -1), range(40, 20, -1)), (range(3, 0, -1), range(8, 5, -1))),
        "one side fragmented": ((range(1, 21), mixed[0][:20]), (range(21, 24), mixed[0][20:23])),
        "fragmented": ((mixed[0][:20], mixed[1][:20]), (mixed[0][20:23], mixed[1][20:23])),
        "groups next to each other": ((range(1, 11), range(5, 15)), (range(11, 14), range(15, 18))),
    }


@pytest.mark.parametrize("blocks", pools().values(), ids=pools())
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (layer_compact, layer_compact),
        (split, split),
        (block_outermost, block_outermost),
        (with_states, with_states),
        (half_heads, all_heads),
    ],
    ids=["layer compact", "split", "block outermost", "beside states", "half the heads"],
)
def test_nixl_posts_as_many_descriptors_as_were_planned(
    pair: Pair, ours: Any, theirs: Any, blocks: tuple[Ids, Ids]
) -> None:
    local, remote = ours(int(pair.memory.ctypes.data)), theirs(pair.peer_base)
    joined = join(local, [remote])[0]
    pairs = [Pairs(np.asarray(there, np.int64), np.asarray(here, np.int64)) for there, here in blocks]
    rows = descriptors(pairs, joined)
    pair.memory[:] = 0
    expected = pair.memory.copy()
    for index, (there, here) in enumerate(blocks):
        for mine, other in zip(local.groups[index].pages, remote.groups[index].pages, strict=True):
            for source, target in zip(there, here, strict=True):
                at = address(local, mine, target) - int(pair.memory.ctypes.data)
                of = address(remote, other, source) - pair.peer_base
                expected[at : at + mine.num_bytes] = pair.peer_bytes[of : of + mine.num_bytes]

    connection = pair.transport.connect(pair.peer, joined.local_strips, joined.remote_strips)
    read = connection.read(rows.local, rows.remote)
    deadline = time.monotonic() + 20
    while read.poll() is Progress.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert read.poll() is Progress.DONE
    figures = read.telemetry()
    assert read.close()
    connection.close()
    assert figures.descriptors == rows.runs
    assert figures.num_bytes == rows.num_bytes
    assert (pair.memory == expected).all()


def address(geometry: Geometry, page: Page, block: int) -> int:
    region = geometry.regions[page.region]
    return region.base + page.offset + block * region.stride
