"""Joining two engines that are not alike: every token of every head lands where it belongs, checked by moving bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError
from connector.plan.build import Blocks, descriptors, pair_blocks
from connector.plan.geometry import Cut, Geometry, Group, Page, Region, Share
from connector.plan.join import block_unit, join
from connector.plan.kinds import ChunkedLocal, Full, Kind, Mla, SlidingWindow, State, blocks_covering

NUM_BLOCKS = 64
LAYERS = 2
STATE_BYTES = 5


class Rank:
    """One rank's memory for one group: an array that says, element by element, which token and head it holds.

    Element: one uint64 for each (token, head), (layer, head, position) in one number; 0 where nothing was written.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        block_size: int,
        kernel_blocks: int = 1,
        share: Share | None = None,
        outermost: bool = False,
        cut: Cut = "tokens",
    ) -> None:
        self.share = share or Share()
        self.block_size, self.kernel_blocks, self.kind = block_size, kernel_blocks, kind
        words = STATE_BYTES if kind == State() else block_size * self.share.count
        self.memory = np.zeros((NUM_BLOCKS, LAYERS, words) if outermost else (LAYERS, NUM_BLOCKS, words), np.uint64)
        self.by_layer = self.memory.transpose(1, 0, 2) if outermost else self.memory
        size = words * 8
        base = int(self.memory.ctypes.data)
        if outermost:
            stride = LAYERS * size
            regions = (Region(base=base, stride=stride, block_bytes=stride, num_blocks=NUM_BLOCKS),)
            pages = tuple(Page(0, layer * size, size) for layer in range(LAYERS))
        else:
            regions = tuple(
                Region(base=base + layer * size * NUM_BLOCKS, stride=size, block_bytes=size, num_blocks=NUM_BLOCKS)
                for layer in range(LAYERS)
            )
            pages = tuple(Page(layer, 0, size) for layer in range(LAYERS))
        group = Group(
            kind=kind,
            block_size=block_size,
            layers=tuple(f"l{layer}" for layer in range(LAYERS)),
            pages=pages,
            share=self.share,
            kernel_blocks=kernel_blocks,
            cut=cut,
        )
        self.geometry = Geometry(regions, (group,))

    def word(self, layer: int, block: int, token: int, head: int) -> tuple[int, int, int]:
        """Where position `token` of a block lies for a head: kernel block, then head, then token."""
        kernel = self.block_size // self.kernel_blocks
        inside = (token // kernel * self.share.count + head - self.share.first) * kernel + token % kernel
        return layer, block, inside

    def fill(self, table: Sequence[int], positions: range) -> None:
        for position in positions:
            block = table[position // self.block_size]
            for layer in range(LAYERS):
                for head in self.share.parts:
                    where = self.word(layer, block, position % self.block_size, head)
                    self.by_layer[where] = value(layer, head, position)


def value(layer: int, head: int, position: int) -> int:
    return 1 + layer + LAYERS * (head + 1000 * position)


def move(ranks_of_p: Sequence[Rank], rank: Rank, table_of_p: Sequence[int], table_of_d: Sequence[int], *, n: int,
         cached: int, index: int = 0, ranks: int = 1) -> int:  # fmt: skip
    """Run the plan by hand: copy every row's bytes. Returns the bytes."""
    kind, theirs = rank.kind, ranks_of_p[0].block_size
    live = blocks_covering(kind.live_range(n), theirs)
    offered = Blocks(live.start, tuple(table_of_p[live.start : live.stop]))
    pairs = pair_blocks(
        kind=kind,
        block_size=rank.block_size,
        remote_block_size=theirs,
        num_tokens=n,
        cached_tokens=cached,
        offered=offered,
        table=table_of_d,
    )
    moved = 0
    joins = join(rank.geometry, [one.geometry for one in ranks_of_p], rank=index, ranks=ranks)
    for source, joined in joins.items():
        rows = descriptors([pairs], joined)
        for local, remote in zip(rows.local.tolist(), rows.remote.tolist(), strict=True):
            ours = joined.local_strips[local // NUM_BLOCKS]
            theirs_strip = joined.remote_strips[remote // NUM_BLOCKS]
            here = ours.base + local % NUM_BLOCKS * ours.stride - int(rank.memory.ctypes.data)
            there = theirs_strip.base + remote % NUM_BLOCKS * theirs_strip.stride
            there -= int(ranks_of_p[source].memory.ctypes.data)
            size = ours.num_bytes
            rank.memory.view(np.uint8).reshape(-1)[here : here + size] = (
                ranks_of_p[source].memory.view(np.uint8).reshape(-1)[there : there + size]
            )
        moved += rows.num_bytes
    return moved


def shares(total: int, ranks: int) -> list[Share]:
    """How vLLM divides `total` KV heads: evenly, or one head for several ranks."""
    count = max(1, total // ranks)
    return [Share(rank * total // ranks, count, total) for rank in range(ranks)]


attention = st.one_of(
    st.just(Full()), st.builds(SlidingWindow, st.integers(1, 60)), st.builds(ChunkedLocal, st.integers(1, 60))
)


@given(
    kind=attention,
    block_sizes=st.sampled_from([(4, 4), (4, 8), (8, 4), (4, 12), (16, 4), (6, 6)]),
    kernel_blocks=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2))),
    heads=st.sampled_from((1, 2, 4)),
    tp=st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4))),
    outermost=st.tuples(st.booleans(), st.booleans()),
    n=st.integers(1, 90),
    cached_blocks=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_every_live_token_of_every_head_arrives_and_nothing_else_moves(
    kind: Kind, block_sizes: tuple[int, int], kernel_blocks: tuple[int, int], heads: int, tp: tuple[int, int],
    outermost: tuple[bool, bool], n: int, cached_blocks: int, seed: int,
) -> None:  # fmt: skip
    kernels = [size // count for size, count in zip(block_sizes, kernel_blocks, strict=True)]
    assume(max(kernels) % min(kernels) == 0)
    rng = np.random.default_rng(seed)
    of_p = [
        Rank(kind, block_size=block_sizes[0], kernel_blocks=kernel_blocks[0], share=share, outermost=outermost[0])
        for share in shares(heads, tp[0])
    ]
    tables = [(1 + rng.permutation(NUM_BLOCKS - 1)).tolist() for _ in range(2)]
    for rank in of_p:
        rank.fill(tables[0], range(n))
    cached = min(cached_blocks, n // block_sizes[1]) * block_sizes[1]
    unit = block_unit(*block_sizes)
    live = blocks_covering(kind.live_range(n), unit)
    expected = range(max(live.start * unit, cached), min(live.stop * unit, n))
    for index, share in enumerate(shares(heads, tp[1])):
        rank = Rank(
            kind, block_size=block_sizes[1], kernel_blocks=kernel_blocks[1], share=share, outermost=outermost[1]
        )
        moved = move(of_p, rank, *tables, n=n, cached=cached, index=index, ranks=tp[1])
        reference = Rank(
            kind, block_size=block_sizes[1], kernel_blocks=kernel_blocks[1], share=share, outermost=outermost[1]
        )
        for position in expected:
            reference.fill(tables[1], range(position, position + 1))
        assert (rank.memory == reference.memory).all()
        units = len(range(max(live.start, cached // unit), live.stop))
        assert moved == units * unit * share.count * LAYERS * 8


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 1), (2, 4), (4, 2)])
def test_a_latent_cache_is_read_once_from_one_rank_and_readers_spread(p: int, d: int) -> None:
    of_p = [Rank(Mla(), block_size=4) for _ in range(p)]
    sources = []
    for index in range(d):
        joins = join(Rank(Mla(), block_size=4).geometry, [one.geometry for one in of_p], rank=index, ranks=d)
        sources.append(list(joins))
    assert sources == [[index * p // d] for index in range(d)]


@pytest.mark.parametrize(("p", "d"), [(8, 8), (8, 4), (4, 8)])
def test_a_state_moves_whole_between_its_own_ranks_even_when_blocks_differ(p: int, d: int) -> None:
    for index in range(2):
        of_p = [Rank(State(), block_size=p, share=Share(source, 1, 2)) for source in range(2)]
        for source, one in enumerate(of_p):
            one.memory[:, [3, 7, 5][8 // p]] = 100 + source
        rank = Rank(State(), block_size=d, share=Share(index, 1, 2))
        moved = move(of_p, rank, [3, 7, 5], [9, 2, 4, 6], n=9, cached=0, index=index, ranks=2)
        assert moved == LAYERS * STATE_BYTES * 8
        assert (rank.memory[:, [9, 2, 4, 6][8 // d]] == 100 + index).all()
        assert np.count_nonzero(rank.memory) == LAYERS * STATE_BYTES


def test_alike_engines_join_page_by_page() -> None:
    rank = Rank(Full(), block_size=16, share=Share(0, 8, 8))
    joined = join(rank.geometry, [rank.geometry])[0]
    assert [pages for pages, _ in joined.strips] == list(rank.geometry.groups[0].pages)
    assert joined.local_strips == joined.remote_strips


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (Rank(Full(), block_size=16), Rank(SlidingWindow(3), block_size=16), "of another kind"),
        (Rank(Full(), block_size=16), Rank(Full(), block_size=24), "One block size must divide the other"),
        (Rank(Full(), block_size=16), Rank(Full(), block_size=16, share=Share(0, 2, 2)), "divided otherwise"),
        (Rank(State(), block_size=16), Rank(State(), block_size=16, share=Share(0, 1, 2)), "divided otherwise"),
        (
            Rank(Full(), block_size=16, share=Share(0, 2, 4)),
            Rank(Full(), block_size=16, share=Share(2, 2, 4)),
            r"no prefill rank holds parts \[0, 1\]",
        ),
        (
            Rank(Full(), block_size=16, cut="heads"),
            Rank(Full(), block_size=32, cut="heads"),
            "cannot be cut between tokens",
        ),
        (
            Rank(Full(), block_size=16, share=Share(0, 1, 2), cut="whole"),
            Rank(Full(), block_size=16, share=Share(0, 2, 2), cut="whole"),
            "cannot be cut between heads",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ours: Rank, theirs: Rank, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        join(ours.geometry, [theirs.geometry])


def test_kernel_blocks_of_one_size_need_no_cut() -> None:
    ours = Rank(Full(), block_size=16, share=Share(0, 2, 2), cut="whole")
    theirs = Rank(Full(), block_size=32, kernel_blocks=2, share=Share(0, 2, 2), cut="whole")
    assert len(join(ours.geometry, [theirs.geometry])[0].lanes) == 2 * LAYERS


def test_other_numbers_of_groups_pages_and_bytes_are_refused() -> None:
    region = Region(base=0, stride=256, block_bytes=256, num_blocks=8)

    def made(*sizes: int, groups: int = 1, kind: Kind | None = None) -> Geometry:
        pages, offset = [], 0
        for size in sizes:
            pages.append(Page(0, offset, size))
            offset += size
        group = Group(kind=kind or Full(), block_size=16, layers=("a",), pages=tuple(pages))
        return Geometry((region,), (group,) * groups)

    with pytest.raises(ConfigError, match="different cache groups"):
        join(made(64), [made(64, groups=2)])
    with pytest.raises(ConfigError, match="another number of pages"):
        join(made(64), [made(32, 32)])
    with pytest.raises(ConfigError, match="another size"):
        join(made(64), [made(32)])
    with pytest.raises(ConfigError, match="does not divide into heads"):
        join(made(64), [made(33)])
    with pytest.raises(ConfigError, match="states differ in size"):
        join(made(64, kind=State()), [made(32, kind=State())])
