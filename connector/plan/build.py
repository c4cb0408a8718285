"""The plan of one request: which pages move, in which order, in how many runs.

Two steps. `pair_blocks` decides *what* moves, in block ids and by sequence position; it knows nothing of memory.
`descriptors` turns the pairs into rows of a `Join`, ordered so that as many as can merge do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from connector.errors import ConfigError
from connector.plan.geometry import Indices, Rows
from connector.plan.join import Join, Lane, block_unit
from connector.plan.kinds import Kind, blocks_covering

NULL_BLOCK = 0  # vLLM marks a position that holds nothing with block 0, on both sides


@dataclass(frozen=True, slots=True)
class Blocks:
    """A stretch of one group's block table: `ids[i]` holds block position `first + i`."""

    first: int
    ids: tuple[int, ...]

    @property
    def positions(self) -> range:
        return range(self.first, self.first + len(self.ids))


def live_blocks(kind: Kind, block_size: int, table: Sequence[int], num_tokens: int) -> Blocks | None:
    """The part of a block table that the next forward pass reads after `num_tokens` computed tokens.

    None when a live position is missing or null: such a table cannot be handed over.
    """
    positions = blocks_covering(kind.live_range(num_tokens), block_size)
    ids = tuple(table[positions.start : positions.stop])
    if len(ids) != len(positions) or NULL_BLOCK in ids:
        return None
    return Blocks(positions.start, ids)


@dataclass(frozen=True, slots=True)
class Pairs:
    """For one group, the blocks that move: `remote[i]` on P is read into `local[i]` on D. int64, same length.

    first: position of the first pair, in units of the smaller of the two block sizes. Where they differ, the larger
    block appears in several pairs, once for each part of it that moves.
    """

    remote: Indices
    local: Indices
    first: int = 0

    def __len__(self) -> int:
        return len(self.remote)


def pair_blocks(
    *,
    kind: Kind,
    block_size: int,
    remote_block_size: int,
    num_tokens: int,
    cached_tokens: int,
    offered: Blocks,
    table: Sequence[int],
) -> Pairs:
    """Pair P's and D's blocks of one group by sequence position.

    block_size, remote_block_size: tokens in a block of D and of P; one divides the other. num_tokens: tokens handed
    over (the prompt without its last one). cached_tokens: tokens at the front that D has in its prefix cache, a whole
    number of its blocks. offered: P's blocks. table: D's block table.
    Moves the positions that are live on D and not cached there. ConfigError when one of them is not in the offer or is
    null on D: pairing must be complete, a hole would be garbage.
    """
    if cached_tokens % block_size:
        raise ConfigError(f"{cached_tokens} cached tokens are not a whole number of blocks of {block_size}.")
    # A state stands for all tokens before it, in one block on either side, however many tokens their blocks name.
    stands_alone = not kind.per_token and block_size != remote_block_size
    unit = 1 if stands_alone else block_unit(block_size, remote_block_size)
    live = blocks_covering(kind.live_range(num_tokens), unit)
    moving = range(max(live.start, cached_tokens // unit), live.stop)
    if not moving:
        return Pairs(np.empty(0, np.int64), np.empty(0, np.int64))
    ours = _positions(moving, block_size // unit)
    theirs = _positions(moving, remote_block_size // unit)
    if theirs.start < offered.first or theirs.stop > offered.positions.stop:
        raise ConfigError(f"The offer holds block positions {offered.positions}, needed are {theirs}.")
    if ours.stop > len(table):
        raise ConfigError(f"The block table has {len(table)} positions, needed are {ours}.")
    remote = np.asarray(offered.ids[theirs.start - offered.first : theirs.stop - offered.first], np.int64)
    local = np.asarray(table[ours.start : ours.stop], np.int64)
    if (remote == NULL_BLOCK).any() or (local == NULL_BLOCK).any():
        raise ConfigError(f"A null block lies in the live positions {ours}.")
    units = np.arange(moving.start, moving.stop)
    return Pairs(
        remote[units // (remote_block_size // unit) - theirs.start],
        local[units // (block_size // unit) - ours.start],
        moving.start,
    )


def _positions(units: range, per_block: int) -> range:
    """Positions of the blocks, of `per_block` units each, that hold these units."""
    return range(units.start // per_block, -(-units.stop // per_block))


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Rows of both sides, ordered so that neighbours merge.

    local, remote: int32 rows as `Join` numbers them. starts: bool, true where a row does not merge with the one before
    it. num_pages: pages that the rows hold; a row holds several where layers lie side by side. num_bytes: total.
    """

    local: Rows
    remote: Rows
    starts: npt.NDArray[np.bool_]
    num_pages: int
    num_bytes: int

    def __len__(self) -> int:
        return len(self.local)

    @property
    def runs(self) -> int:
        """Descriptors left after NIXL has merged neighbours."""
        return int(np.count_nonzero(self.starts))

    def parts(self, max_runs: int) -> list[tuple[Rows, Rows]]:
        """Cut into parts of at most `max_runs` whole runs; each is posted, awaited and retried by itself."""
        cuts = np.flatnonzero(self.starts)[max_runs::max_runs]
        if not len(self):
            return []
        return list(zip(np.split(self.local, cuts), np.split(self.remote, cuts), strict=True))


def descriptors(pairs: Sequence[Pairs], join: Join) -> Descriptors:
    """Expand the pairs of all groups into rows of a join.

    Within a strip the rows of *all* groups that use it are sorted by P's block. Merging needs a successor on both
    sides, and sorting puts every such successor next to its predecessor, so no order has fewer runs.
    """
    known: dict[tuple[tuple[int, int | None], ...], _Ordered] = {}
    strips = [_strip_rows(pairs, join, lanes, known) for lanes in join.lanes_of]
    total = sum(len(rows.local) for rows in strips)
    # Filled in place: for long prompts the time goes into fresh memory, not into arithmetic.
    local, remote, starts = np.empty(total, np.int32), np.empty(total, np.int32), np.ones(total, np.bool_)
    num_pages = num_bytes = position = 0
    for strip, (rows, lanes) in enumerate(zip(strips, join.lanes_of, strict=True)):
        here = slice(position, position + len(rows.local))
        np.add(rows.local, strip * join.local.num_blocks, out=local[here])
        np.add(rows.remote, strip * join.remote.num_blocks, out=remote[here])
        if join.is_dense(strip):
            starts[here] = rows.starts
        num_pages += sum(lane.pages * count for lane, count in zip(lanes, rows.counts, strict=True))
        num_bytes += len(rows.local) * join.local_strips[strip].num_bytes
        position = here.stop
    return Descriptors(local, remote, starts, num_pages, num_bytes)


def _strip_rows(
    pairs: Sequence[Pairs], join: Join, lanes: Sequence[Lane], known: dict[tuple[tuple[int, int | None], ...], _Ordered]
) -> _Ordered:
    """The blocks of one strip; strips that the same groups use have the same ones."""
    users = tuple((lane.group, lane.phase) for lane in lanes)
    if users not in known:
        known[users] = _ordered([_chosen(pairs[lane.group], lane.phase, _ratio(join, lane)) for lane in lanes])
    return known[users]


@dataclass(frozen=True, slots=True)
class _Ordered:
    """D's and P's blocks in the order of P's, where runs start, and how many blocks each lane has among them."""

    local: Rows
    remote: Rows
    starts: npt.NDArray[np.bool_]
    counts: tuple[int, ...]


def _ordered(chosen: Sequence[tuple[Indices, Indices]]) -> _Ordered:
    remote = np.concatenate([theirs for theirs, _ in chosen]).astype(np.int32)
    local = np.concatenate([ours for _, ours in chosen]).astype(np.int32)
    order = np.argsort(remote, kind="stable")
    local, remote = local[order], remote[order]
    return _Ordered(local, remote, run_starts(local, remote), tuple(len(ours) for _, ours in chosen))


def _ratio(join: Join, lane: Lane) -> int:
    """How many of the smaller blocks the larger one holds."""
    ours, theirs = (side.groups[lane.group].block_size for side in (join.local, join.remote))
    return max(ours, theirs) // min(ours, theirs)


def _chosen(pairs: Pairs, phase: int | None, ratio: int) -> tuple[Indices, Indices]:
    """The pairs that a lane moves."""
    if phase is None:
        return pairs.remote, pairs.local
    own = slice((phase - pairs.first) % ratio, None, ratio)
    return pairs.remote[own], pairs.local[own]


def run_starts(local: Indices | Rows, remote: Indices | Rows) -> npt.NDArray[np.bool_]:
    """True where a row does not continue the one before it by one block on both sides.

    Example: local 4 5 6 9, remote 1 2 3 4 gives true false false true: two runs.
    """
    starts = np.ones(len(local), np.bool_)
    starts[1:] = (np.diff(local) != 1) | (np.diff(remote) != 1)
    return starts
