"""One request's hand-over under four plans: without HMA, the in-tree connector's, ours, and the least possible.

Ours is computed by the functions that the connector calls: `live_blocks`, `pair_blocks`, `join`, `descriptors`. For the
in-tree connector of vLLM 0.32 (`v1/nixl/base_scheduler.py`, `base_worker.py`) its clip and its order are applied to the
same pages: all positions move, of sliding groups the last ceil(window / block) + 1; rows go region by region, or group
by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from connector.errors import ConfigError
from connector.plan.build import Pairs, descriptors, live_blocks, pair_blocks, run_starts
from connector.plan.join import Join, join
from connector.plan.kinds import Kind, State
from hma_cli.inspection.engine import Engine
from hma_cli.inspection.pool import Pool, PoolState, Tables, history, prefilled, received


@dataclass(frozen=True, slots=True)
class Amount:
    """What a plan moves: descriptors before merging, runs after it, bytes."""

    descriptors: int = 0
    runs: int = 0
    num_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.descriptors + other.descriptors, self.runs + other.runs, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """A request of `prompt_tokens` tokens from P to D, where D has `cached_tokens` of them in its prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    prefill: Engine
    decode: Engine
    pool: PoolState = PoolState.FRESH
    seed: int = 0

    @property
    def handed_tokens(self) -> int:
        """Tokens that P computes and D loads: the prompt without its last one."""
        return self.prompt_tokens - 1

    def check(self) -> None:
        """ConfigError for numbers that no request can have."""
        if self.prompt_tokens < 1:
            raise ConfigError(f"A prompt has at least one token, not {self.prompt_tokens}.")
        step = lcm(*(table.block_size for table in self.decode.tables))
        most = self.handed_tokens // step * step
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ConfigError(
                f"D cannot have {self.cached_tokens} of {self.prompt_tokens} prompt tokens cached: the last one is "
                "always computed.",
                remedy=f"Give --cached-tokens from 0 to {most}.",
            )
        if self.cached_tokens % step:
            below = self.cached_tokens // step * step
            choice = f"{below} or {below + step}" if below < most else f"{below}"
            raise ConfigError(
                f"{self.cached_tokens} cached tokens are not a whole number of D's blocks of {step} tokens.",
                remedy=f"Give --cached-tokens {choice}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What moves of one group. live: token positions that D's next token reads. pairs: blocks, by position."""

    index: int
    kind: Kind
    live: range
    pairs: Pairs
    amount: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Our plan. strips: of the joins, those in which something moves, over all ranks."""

    groups: tuple[GroupPlan, ...]
    total: Amount
    strips: int


def ours(case: HandOver) -> Plan:
    """The plan that the connector runs. ConfigError when the two sides do not fit."""
    case.check()
    tables_p, tables_d = block_tables(case, case.handed_tokens)
    pairs = _our_pairs(case, tables_p, tables_d)
    joins = _joins(case)
    amounts = [Amount() for _ in pairs]
    total, strips = Amount(), 0
    for joined in joins:
        rows = descriptors(pairs, joined)
        total += Amount(rows.num_pages, rows.runs, rows.num_bytes)
        strips += len(np.unique(rows.local // joined.local.num_blocks))
        for index in range(len(pairs)):
            alone = descriptors([pair if i == index else _NOTHING for i, pair in enumerate(pairs)], joined)
            amounts[index] += Amount(alone.num_pages, alone.runs, alone.num_bytes)
    groups = tuple(
        GroupPlan(
            index=index, kind=table.kind, live=table.kind.live_range(case.handed_tokens), pairs=pair, amount=amount
        )
        for index, (table, pair, amount) in enumerate(zip(case.decode.tables, pairs, amounts, strict=True))
    )
    return Plan(groups=groups, total=total, strips=strips)


def lower_bound(case: HandOver, plan: Plan) -> Amount:
    """Exactly the live tokens' bytes; as many descriptors as pages hold one; one run in each strip."""
    num_bytes = 0
    for table, layers, planned in zip(case.decode.tables, case.decode.data_bytes, plan.groups, strict=True):
        tokens = len(range(max(planned.live.start, case.cached_tokens), planned.live.stop))
        num_bytes += sum(table.kind.live_bytes(tokens, table.block_size, size) for size in layers)
    return Amount(plan.total.descriptors, plan.strips, num_bytes * len(case.decode.ranks))


def in_tree(case: HandOver) -> Amount:
    """What vLLM's own NIXL connector moves with HMA. `case` holds engines as that connector sees them."""
    if [table.block_size for table in case.prefill.tables] != [table.block_size for table in case.decode.tables]:
        raise ConfigError("The in-tree connector's way with different block sizes is not modelled.")
    return _their_way(case, clipped)


def without_hma(case: HandOver) -> Amount:
    """Everything of every layer, all positions that D has not cached. `case` holds engines without HMA."""
    return _their_way(case, lambda table, _kind, _block_size: table)


def _their_way(case: HandOver, clip: Callable[[Sequence[int], Kind, int], Sequence[int]]) -> Amount:
    tables_p, tables_d = block_tables(case, case.prompt_tokens)
    pairs = []
    for table, remote, local in zip(case.decode.tables, tables_p, tables_d, strict=True):
        uncached = local[case.cached_tokens // table.block_size :]
        kept = (clip(blocks, table.kind, table.block_size) for blocks in (remote, uncached))
        pairs.append(_from_the_end(*kept))
    return sum((_in_their_order(pairs, joined) for joined in _joins(case)), Amount())


_NOTHING = Pairs(np.empty(0, np.int64), np.empty(0, np.int64))


def _our_pairs(case: HandOver, tables_p: Tables, tables_d: Tables) -> list[Pairs]:
    if case.handed_tokens == 0:
        return [_NOTHING for _ in tables_d]
    found = []
    for theirs, mine, table_p, table_d in zip(case.prefill.tables, case.decode.tables, tables_p, tables_d, strict=True):
        offered = live_blocks(theirs.kind, theirs.block_size, table_p, case.handed_tokens)
        assert offered is not None, "the simulated pool keeps live blocks"
        found.append(
            pair_blocks(
                kind=mine.kind,
                block_size=mine.block_size,
                remote_block_size=theirs.block_size,
                num_tokens=case.handed_tokens,
                cached_tokens=case.cached_tokens,
                offered=offered,
                table=table_d,
            )
        )
    return found


def block_tables(case: HandOver, num_tokens: int) -> tuple[Tables, Tables]:
    """P's and D's block tables for `num_tokens` tokens, from pools in the state that was asked for."""
    pools = []
    for engine, decodes in ((case.prefill, False), (case.decode, True)):
        pool = Pool(engine.num_blocks, engine.prefix_caching)
        seed = 2 * case.seed + decodes
        if case.pool is PoolState.STEADY:
            history(pool, engine.tables, case.prompt_tokens, seed=seed, decodes=decodes)
        elif case.pool is PoolState.RANDOM:
            pool.shuffle(seed)
        pools.append(pool)
    return (
        prefilled(pools[0], case.prefill.tables, num_tokens),
        received(pools[1], case.decode.tables, num_tokens, case.cached_tokens),
    )


def _joins(case: HandOver) -> list[Join]:
    """Every rank of D with every rank of P that it reads from."""
    ranks = len(case.decode.ranks)
    return [
        joined
        for rank, geometry in enumerate(case.decode.ranks)
        for joined in join(geometry, case.prefill.ranks, rank=rank, ranks=ranks).values()
    ]


def clipped(table: Sequence[int], kind: Kind, block_size: int) -> Sequence[int]:
    """What the in-tree connector keeps of a block list. Chunks are not clipped, and null blocks move."""
    if kind == State():
        return table[-1:]
    return table if kind.window is None else table[-(-(-kind.window // block_size) + 1) :]


def _from_the_end(remote: Sequence[int], local: Sequence[int]) -> Pairs:
    count = min(len(remote), len(local))
    return Pairs(np.asarray(remote[len(remote) - count :], np.int64), np.asarray(local[len(local) - count :], np.int64))


def _in_their_order(pairs: Sequence[Pairs], joined: Join) -> Amount:
    """Rows strip by strip, in each the groups one after another; group by group beside states, and where some regions
    belong to one group alone.

    Pages that lie side by side are rows of their own, which NIXL does not merge.
    """
    has_states = any(group.kind == State() for group in joined.local.groups)
    users = [{lane.group for lane in lanes} for lanes in joined.lanes_of]
    by_group = has_states or len({min(groups) if len(groups) == 1 else None for groups in users}) > 1
    total = Amount()
    for strip, lanes in enumerate(joined.lanes_of):
        for batch in [[lane] for lane in lanes] if by_group else [lanes]:
            local, remote = (
                np.concatenate([getattr(pairs[lane.group], side) for lane in batch]) for side in ("local", "remote")
            )
            rows = sum(lane.pages * len(pairs[lane.group]) for lane in batch)
            merges = joined.is_dense(strip) and all(lane.pages == 1 for lane in batch)
            runs = int(np.count_nonzero(run_starts(local, remote))) if merges else rows
            total += Amount(rows, runs, len(local) * joined.local_strips[strip].num_bytes)
    return total
