"""The plan: what is live, which blocks pair, which pages move, in how many runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError
from connector.plan.build import Blocks, Descriptors, Pairs, descriptors, live_blocks, pair_blocks, run_starts
from connector.plan.capacity import capacity
from connector.plan.geometry import Cache, Geometry, Group, Page, Region, Share, cache_of_tensor
from connector.plan.join import Join, join
from connector.plan.kinds import (
    ChunkedLocal,
    Full,
    Kind,
    Mla,
    SlidingWindow,
    State,
    blocks_covering,
    kind_from_wire,
)

GOLDEN = Path(__file__).parent / "golden"
kinds = st.one_of(
    st.sampled_from((Full(), State(), Mla())),
    st.builds(SlidingWindow, st.integers(1, 200)),
    st.builds(ChunkedLocal, st.integers(1, 200)),
    st.builds(Mla, st.integers(1, 200)),
)


def read_by_next_token(kind: Kind, num_tokens: int) -> set[int]:
    """Token-level oracle: which cached positions the next tokens read, as each kind of layer computes."""
    return {key for key in range(num_tokens) for query in range(num_tokens, num_tokens + 5) if reads(kind, query, key)}


def reads(kind: Kind, query: int, key: int) -> bool:
    """Whether computing position `query` reads what position `key` left in the cache."""
    match kind:
        case SlidingWindow() | Mla(window=int()):
            return query - key < kind.window
        case ChunkedLocal():
            return query // kind.chunk == key // kind.chunk
        case State():
            return query == key + 1
    return True


@given(kinds, st.integers(0, 400))
def test_the_live_range_is_what_the_next_token_reads(kind: Kind, num_tokens: int) -> None:
    assert set(kind.live_range(num_tokens)) == read_by_next_token(kind, num_tokens)


@given(kinds, st.integers(0, 400), st.integers(1, 64))
def test_the_cover_is_minimal(kind: Kind, num_tokens: int, block_size: int) -> None:
    live = read_by_next_token(kind, num_tokens)
    assert set(blocks_covering(kind.live_range(num_tokens), block_size)) == {token // block_size for token in live}


def test_kinds_from_the_wire_are_the_known_ones_only() -> None:
    assert kind_from_wire("full", None, None) == Full()
    assert kind_from_wire("sliding_window", 7, None) == SlidingWindow(7)
    for name, window in (("sink", None), ("full", 3), ("sliding_window", None)):
        with pytest.raises(ConfigError):
            kind_from_wire(name, window, None)
    for kind in (Full(), SlidingWindow(3), ChunkedLocal(4), State(), Mla(), Mla(5)):
        assert kind_from_wire(kind.name, kind.window, kind.chunk) == kind
    for make in (SlidingWindow, ChunkedLocal, Mla):
        with pytest.raises(ConfigError, match="at least one token"):
            make(0)


@given(kinds, st.integers(1, 64), st.integers(0, 300), st.integers(1, 64))
def test_live_bytes_are_the_bytes_of_the_live_tokens(kind: Kind, size: int, num_tokens: int, block_size: int) -> None:
    live = len(read_by_next_token(kind, num_tokens))
    expected = (size if live else 0) if kind == State() else live * size
    page_bytes = size if kind == State() else size * block_size
    assert kind.live_bytes(live, block_size, page_bytes) == expected


def test_live_blocks_of_a_table_with_dead_positions() -> None:
    table = [0, 0, 5, 6, 7]
    assert live_blocks(SlidingWindow(64), 32, table, 150) == Blocks(2, (5, 6, 7))
    assert live_blocks(Full(), 32, table, 150) is None  # a live position is null
    assert live_blocks(SlidingWindow(64), 32, table, 161) is None  # a live position is missing


@given(kinds, st.integers(1, 32), st.integers(1, 300), st.integers(0, 12), st.randoms())
def test_pairs_join_equal_positions_and_leave_out_what_is_cached(
    kind: Kind, block_size: int, num_tokens: int, cached_blocks: int, rng: Random
) -> None:
    cached = min(cached_blocks, num_tokens // block_size)
    live = blocks_covering(kind.live_range(num_tokens), block_size)
    ids = list(range(1, 1000))
    rng.shuffle(ids)
    remote = {position: ids.pop() for position in live}
    table = [ids.pop() if position in live else 0 for position in range(-(-num_tokens // block_size))]
    pairs = pair_blocks(
        kind=kind,
        block_size=block_size,
        remote_block_size=block_size,
        num_tokens=num_tokens,
        cached_tokens=cached * block_size,
        offered=Blocks(live.start, tuple(remote.values())),
        table=table,
    )
    expected = [(remote[position], table[position]) for position in live if position >= cached]
    assert list(zip(pairs.remote.tolist(), pairs.local.tolist(), strict=True)) == expected


@pytest.mark.parametrize(("ours", "theirs"), [(640, 2048), (2048, 640), (640, 640)])
def test_a_state_is_paired_by_what_it_stands_for(ours: int, theirs: int) -> None:
    """Without prefix caching a block is named for the longest context, with it for an attention block's tokens."""
    blocks, table = {640: (1, (31,)), 2048: (0, (31,))}, {640: [0, 41, 0], 2048: [41]}
    pairs = pair_blocks(
        kind=State(),
        block_size=ours,
        remote_block_size=theirs,
        num_tokens=700,
        cached_tokens=0,
        offered=Blocks(*blocks[theirs]),
        table=table[ours],
    )
    assert (pairs.remote.tolist(), pairs.local.tolist()) == ([31], [41])


@pytest.mark.parametrize(
    ("cached", "offered", "table", "told"),
    [
        (5, Blocks(0, (1, 2, 3)), [4, 5, 6], "whole number of blocks"),
        (0, Blocks(1, (2, 3)), [4, 5, 6], "The offer holds"),
        (0, Blocks(0, (1, 2)), [4, 5, 6], "The offer holds"),
        (0, Blocks(0, (1, 2, 3)), [4, 5], "The block table has 2"),
        (0, Blocks(0, (1, 2, 3)), [4, 0, 6], "null block"),
        (0, Blocks(0, (1, 0, 3)), [4, 5, 6], "null block"),
    ],
)
def test_a_pairing_with_a_hole_is_refused(cached: int, offered: Blocks, table: Sequence[int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        pair_blocks(
            kind=Full(),
            block_size=16,
            remote_block_size=16,
            num_tokens=40,
            cached_tokens=cached,
            offered=offered,
            table=table,
        )


def geometry(
    layers: Sequence[int], *, base: int, num_blocks: int, page: int = 64, stride: int = 64, split: bool = False
) -> Geometry:
    """Groups of `layers[i]` layers over shared regions, as vLLM lays them: layer j of every group in region j."""
    copies = 2 if split else 1
    stride //= copies
    page //= copies
    regions = tuple(
        Region(base=base + index * stride * num_blocks, stride=stride, block_bytes=page, num_blocks=num_blocks)
        for index in range(max(layers) * copies)
    )
    groups = tuple(
        Group(
            kind=Full(),
            block_size=16,
            layers=tuple(f"g{group}l{layer}" for layer in range(count)),
            pages=tuple(Page(index, 0, page) for index in range(count * copies)),
        )
        for group, count in enumerate(layers)
    )
    return Geometry(regions, groups)


def interleaved(layers: Sequence[int], *, base: int, num_blocks: int, page: int = 64) -> Geometry:
    """The same groups block-outermost: one region, in whose blocks the layers of a group lie one after another."""
    block = page * max(layers)
    region = Region(base=base, stride=block, block_bytes=block, num_blocks=num_blocks)
    groups = tuple(
        Group(
            kind=Full(),
            block_size=16,
            layers=tuple(f"g{group}l{layer}" for layer in range(count)),
            pages=tuple(Page(0, index * page, page) for index in range(count)),
        )
        for group, count in enumerate(layers)
    )
    return Geometry((region,), groups)


def one(local: Geometry, remote: Geometry) -> Join:
    return join(local, [remote])[0]


def addresses(rows: Descriptors, joined: Join) -> list[tuple[int, int, int]]:
    """(D's address, P's address, bytes) of every row, from first principles."""
    found = []
    for local, remote in zip(rows.local.tolist(), rows.remote.tolist(), strict=True):
        ours, theirs = (
            (strips[row // count], row % count)
            for strips, row, count in (
                (joined.local_strips, local, joined.local.num_blocks),
                (joined.remote_strips, remote, joined.remote.num_blocks),
            )
        )
        assert ours[0].num_bytes == theirs[0].num_bytes
        found.append((*(strip.base + block * strip.stride for strip, block in (ours, theirs)), ours[0].num_bytes))
    return found


Case = tuple[list[Pairs], Geometry, Geometry]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if draw(st.booleans()):
        ours = interleaved(layers, base=1 << 20, num_blocks=40)
        theirs = interleaved(layers, base=1 << 30, num_blocks=50)
    else:
        stride, split = draw(st.sampled_from((64, 96))), draw(st.booleans())
        ours = geometry(layers, base=1 << 20, num_blocks=40, stride=stride, split=split)
        theirs = geometry(layers, base=1 << 30, num_blocks=50, split=split)
    counts = [draw(st.integers(0, 4)) for _ in layers]
    local = draw(st.permutations(range(1, 20)))[: sum(counts)]
    remote = draw(st.permutations(range(1, 20)))[: sum(counts)]
    pairs, start = [], 0
    for count in counts:
        stop = start + count
        pairs.append(Pairs(np.array(remote[start:stop], np.int64), np.array(local[start:stop], np.int64)))
        start = stop
    return pairs, ours, theirs


@given(cases())
@settings(max_examples=200)
def test_descriptors_are_every_page_of_every_pair_once(case: Case) -> None:
    pairs, ours, theirs = case
    expected = set()
    for group, pair in enumerate(pairs):
        for left, right in zip(ours.groups[group].pages, theirs.groups[group].pages, strict=True):
            for local, remote in zip(pair.local.tolist(), pair.remote.tolist(), strict=True):
                here, there = ours.regions[left.region], theirs.regions[right.region]
                expected.add(
                    (
                        here.base + left.offset + local * here.stride,
                        there.base + right.offset + remote * there.stride,
                        left.num_bytes,
                    )
                )
    joined = one(ours, theirs)
    rows = descriptors(pairs, joined)
    found = addresses(rows, joined)
    page = ours.groups[0].pages[0].num_bytes
    pages = [(here + at, there + at, page) for here, there, size in found for at in range(0, size, page)]
    assert len(pages) == len(set(pages)) == rows.num_pages
    assert set(pages) == expected
    assert rows.num_bytes == sum(size for _, _, size in found)
    assert rows.runs == merged(found)


def merged(rows: Sequence[tuple[int, int, int]]) -> int:
    """Runs of (local, remote, bytes) rows in their order, by addresses alone. Rows of unequal length never merge."""
    return sum(
        not (
            index
            and rows[index - 1][2] == row[2]
            and all(rows[index - 1][side] + row[2] == row[side] for side in (0, 1))
        )
        for index, row in enumerate(rows)
    )


@given(st.permutations(range(1, 6)), st.permutations(range(1, 6)), st.booleans())
@settings(max_examples=40)
def test_no_other_order_has_fewer_runs(local: list[int], remote: list[int], outermost: bool) -> None:
    layout = interleaved([1], base=0, num_blocks=10) if outermost else geometry([1], base=0, num_blocks=10)
    joined = one(layout, layout)
    rows = descriptors([Pairs(np.array(remote), np.array(local))], joined)
    best = min(
        merged([(ours * 64, theirs * 64, 64) for ours, theirs in order])
        for order in itertools.permutations(zip(local, remote, strict=True))
    )
    assert rows.runs == best


def test_run_starts_by_hand() -> None:
    assert run_starts(np.array([4, 5, 6, 9]), np.array([1, 2, 3, 4])).tolist() == [True, False, False, True]


def test_a_whole_block_of_all_layers_is_one_run_when_blocks_are_outermost() -> None:
    layout = interleaved([3], base=0, num_blocks=10)
    rows = descriptors([Pairs(np.array([2, 3, 7]), np.array([4, 5, 6]))], one(layout, layout))
    assert (rows.num_pages, len(rows), rows.runs) == (9, 3, 2)


@given(cases(), st.integers(1, 5))
def test_parts_cover_the_rows_and_cut_between_runs(case: Case, most: int) -> None:
    pairs, ours, theirs = case
    rows = descriptors(pairs, one(ours, theirs))
    parts = rows.parts(most)
    assert [x for local, _ in parts for x in local.tolist()] == rows.local.tolist()
    assert [x for _, remote in parts for x in remote.tolist()] == rows.remote.tolist()
    starts = iter(rows.starts.tolist())
    for local, _ in parts:
        flags = [next(starts) for _ in local]
        assert flags[0]
        assert sum(flags) <= most


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_plans(path: Path) -> None:
    golden = json.loads(path.read_text())
    for layout, expected in golden["expected"].items():
        sizes = [group["layers"] for group in golden["groups"]]
        both = geometry(sizes, base=0, num_blocks=2000, split=layout == "split")
        pairs, block = [], 1
        for group in golden["groups"]:
            kind = kind_from_wire(group["kind"], group["window"], None)
            live = blocks_covering(kind.live_range(golden["num_tokens"]), golden["block_size"])
            ids = np.arange(block, block + len(live))
            block += len(live)
            pairs.append(Pairs(ids, ids))
        rows = descriptors(pairs, one(both, both))
        assert (len(rows), rows.runs) == (expected["descriptors"], expected["runs"]), layout


def test_tensor_shapes_that_backends_hand_over() -> None:
    """C9."""

    def cache(shape: tuple[int, ...], strides: tuple[int, ...]) -> Cache:
        return cache_of_tensor(base=1000, shape=shape, strides=strides, itemsize=2, num_blocks=8)

    def regions(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Region, ...]:
        return cache(shape, strides).regions

    packed = Region(base=1000, stride=2 * 192, block_bytes=2 * 192, num_blocks=8)
    assert regions((8, 2, 8, 12), (192, 96, 12, 1)) == (packed,)
    assert regions((8, 8, 2, 12), (192, 12, 96, 1)) == (packed,)  # another order inside the page
    assert regions((8, 2, 8, 12), (256, 96, 12, 1))[0].stride == 512  # padded pages
    halves = regions((2, 8, 8, 12), (768, 96, 12, 1))
    assert [region.base for region in halves] == [1000, 1000 + 2 * 768]
    assert halves[0].block_bytes == 2 * 96
    cut = cache((24, 2, 8, 4), (64, 32, 4, 1))  # each block in three kernel blocks
    assert cut == Cache((Region(base=1000, stride=2 * 192, block_bytes=2 * 192, num_blocks=8),), 3)
    assert cache((2, 16, 8, 12), (1536, 96, 12, 1)).kernel_blocks == 2
    with pytest.raises(ConfigError, match="lie apart"):
        regions((24, 2, 8, 4), (100, 32, 4, 1))
    with pytest.raises(ConfigError, match="not contiguous"):
        regions((8, 2, 8, 12), (400, 200, 12, 1))
    with pytest.raises(ConfigError, match="block dimension"):
        regions((3, 2, 8, 12), (192, 96, 12, 1))
    with pytest.raises(ConfigError, match="overlap"):
        regions((8, 2, 8, 12), (96, 96, 12, 1))


def test_a_geometry_that_cannot_be_is_refused() -> None:
    region = Region(base=0, stride=64, block_bytes=64, num_blocks=4)

    def group(*pages: Page) -> Group:
        return Group(kind=Full(), block_size=16, layers=("a",), pages=pages)

    with pytest.raises(ConfigError, match="does not exist"):
        Geometry((region,), (group(Page(1, 0, 64)),))
    for page in (Page(0, 0, 65), Page(0, 1, 64), Page(0, -1, 8), Page(0, 0, 0)):
        with pytest.raises(ConfigError, match="does not lie in a block"):
            Geometry((region,), (group(page),))
    with pytest.raises(ConfigError, match="one page twice"):
        group(Page(0, 0, 64), Page(0, 0, 64))
    with pytest.raises(ConfigError, match="does not divide into 3"):
        Group(kind=Full(), block_size=16, layers=("a",), pages=(Page(0, 0, 64),), kernel_blocks=3)
    with pytest.raises(ConfigError, match="share"):
        Share(2, 3, 4)


def test_capacity_by_hand() -> None:
    """Two groups of one layer share one region of 101 blocks of 16 tokens; window 17; requests of 160 tokens.

    With HMA a request holds 10 blocks of the full group, and of the sliding one the block of its 16 live tokens and one
    in the making: 12, so 100 / 12 requests. Without, each of 10 blocks costs two pages: 100 / 20 requests.
    """
    region = Region(base=0, stride=64, block_bytes=64, num_blocks=101)
    groups = tuple(
        Group(kind=kind, block_size=16, layers=(name,), pages=(Page(0, 0, 64),))
        for name, kind in (("full", Full()), ("window", SlidingWindow(17)))
    )
    found = capacity(Geometry((region,), groups), 160)
    assert found.hma_tokens == int(100 / 12 * 160)
    assert found.full_tokens == int(100 / 20 * 160)
    assert found.gain == pytest.approx(20 / 12, rel=1e-3)
