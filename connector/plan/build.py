"""The plan of one request: which pages move, in which order, in how many runs.

Two steps. `pair_blocks` decides *what* moves, in block ids and by sequence position; it knows nothing of memory.
`descriptors` turns the pairs into page indices of both sides, ordered so that as many as can merge do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from connector.errors import ConfigError
from connector.plan.geometry import Geometry, Indices
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
    """For one group, the blocks that move: `remote[i]` on P is read into `local[i]` on D. int64, same length."""

    remote: Indices
    local: Indices

    def __len__(self) -> int:
        return len(self.remote)


def pair_blocks(
    *,
    kind: Kind,
    block_size: int,
    num_tokens: int,
    cached_tokens: int,
    offered: Blocks,
    table: Sequence[int],
) -> Pairs:
    """Pair P's and D's blocks of one group by sequence position.

    num_tokens: tokens handed over (the prompt without its last one). cached_tokens: tokens at the front that D has in
    its prefix cache, a whole number of blocks. offered: P's blocks. table: D's block table.
    Moves the positions that are live on D and not cached there. ConfigError when one of them is not in the offer or is
    null on D: pairing must be complete, a hole would be garbage.
    """
    if cached_tokens % block_size:
        raise ConfigError(f"{cached_tokens} cached tokens are not a whole number of blocks of {block_size}.")
    live = blocks_covering(kind.live_range(num_tokens), block_size)
    moving = range(max(live.start, cached_tokens // block_size), live.stop)
    if not moving:
        return Pairs(np.empty(0, np.int64), np.empty(0, np.int64))
    if moving.start < offered.first or moving.stop > offered.positions.stop:
        raise ConfigError(f"The offer holds block positions {offered.positions}, needed are {moving}.")
    if moving.stop > len(table):
        raise ConfigError(f"The block table has {len(table)} positions, needed are {moving}.")
    remote = np.asarray(offered.ids[moving.start - offered.first : moving.stop - offered.first], np.int64)
    local = np.asarray(table[moving.start : moving.stop], np.int64)
    if (remote == NULL_BLOCK).any() or (local == NULL_BLOCK).any():
        raise ConfigError(f"A null block lies in the live positions {moving}.")
    return Pairs(remote, local)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Page indices of both sides, row by row, ordered so that neighbours merge.

    local, remote: int32 page indices (region by region, as `Geometry.offsets` numbers them). starts: bool, true where a
    row does not merge with the one before it. num_bytes: total.
    """

    local: Indices
    remote: Indices
    starts: npt.NDArray[np.bool_]
    num_bytes: int

    def __len__(self) -> int:
        return len(self.local)

    @property
    def runs(self) -> int:
        """Descriptors left after NIXL has merged neighbours."""
        return int(np.count_nonzero(self.starts))

    def parts(self, max_runs: int) -> list[tuple[Indices, Indices]]:
        """Cut into parts of at most `max_runs` whole runs; each is posted, awaited and retried by itself."""
        cuts = np.flatnonzero(self.starts)[max_runs::max_runs]
        if not len(self):
            return []
        return list(zip(np.split(self.local, cuts), np.split(self.remote, cuts), strict=True))


def descriptors(pairs: Sequence[Pairs], local: Geometry, remote: Geometry) -> Descriptors:
    """Expand the pairs of all groups into page indices.

    Within a region the pairs of *all* groups that share it are sorted by P's block id. Merging needs a successor on
    both sides, and sorting puts every such successor next to its predecessor, so no order has fewer runs.
    """
    rows_local, rows_remote, rows_starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    num_bytes = 0
    orders: dict[tuple[int, ...], tuple[Indices, Indices]] = {}
    for ours_index, theirs_index, members in _shared_regions(local, remote):
        if members not in orders:
            orders[members] = _ordered([pairs[index] for index in members])
        local_ids, remote_ids = orders[members]
        ours, theirs = local.regions[ours_index], remote.regions[theirs_index]
        rows_local.append(local_ids + local.offsets[ours_index])
        rows_remote.append(remote_ids + remote.offsets[theirs_index])
        if ours.is_dense and theirs.is_dense:
            rows_starts.append(run_starts(local_ids, remote_ids))
        else:
            rows_starts.append(np.ones(len(local_ids), np.bool_))
        num_bytes += len(local_ids) * ours.page_bytes
    return Descriptors(
        np.concatenate(rows_local).astype(np.int32),
        np.concatenate(rows_remote).astype(np.int32),
        np.concatenate(rows_starts),
        num_bytes,
    )


def _shared_regions(local: Geometry, remote: Geometry) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Each (D region, P region) that some group joins, with the groups that join them."""
    members: dict[tuple[int, int], list[int]] = {}
    for index, (ours, theirs) in enumerate(zip(local.groups, remote.groups, strict=True)):
        for pair in zip(ours.regions, theirs.regions, strict=True):
            members.setdefault(pair, []).append(index)
    for (ours_region, theirs_region), groups in members.items():
        yield ours_region, theirs_region, tuple(groups)


def _ordered(pairs: Sequence[Pairs]) -> tuple[Indices, Indices]:
    local = np.concatenate([pair.local for pair in pairs])
    remote = np.concatenate([pair.remote for pair in pairs])
    order = np.argsort(remote, kind="stable")
    return local[order], remote[order]


def run_starts(local: Indices, remote: Indices) -> npt.NDArray[np.bool_]:
    """True where a row does not continue the one before it by one block on both sides.

    Example: local 4 5 6 9, remote 1 2 3 4 gives true false false true: two runs.
    """
    starts = np.ones(len(local), np.bool_)
    starts[1:] = (np.diff(local) != 1) | (np.diff(remote) != 1)
    return starts
