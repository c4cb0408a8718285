"""The two engines of a hand-over, as the plan sees them: planned from groups, or described by a running server."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from connector.errors import ConfigError
from connector.plan.geometry import Cut, Geometry
from hma_cli.inspection.arena import Division, KvLayout, arena, division_for
from hma_cli.inspection.pool import PoolState, Table, pool_size
from hma_cli.models.caches import Recurrent
from hma_cli.models.grouping import Grouping, GroupLayer

P_BASE, D_BASE = 1 << 44, 1 << 45  # addresses of the two arenas: any that do not overlap

IN_TREE_STATES = ("mamba1", "mamba2", "gdn")
"""Families of states that vLLM's own connector knows how to cut (`ssm_conv_transfer_utils.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """tables: the groups' block tables. ranks: each rank's memory. data_bytes: for each group, of each layer's page the
    bytes that carry KV or state."""

    tables: tuple[Table, ...]
    ranks: tuple[Geometry, ...]
    data_bytes: tuple[tuple[int, ...], ...]
    prefix_caching: bool

    @property
    def num_blocks(self) -> int:
        return self.ranks[0].num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How the memory of a planned engine is laid out.

    num_blocks: in the pool; None for what a request of `num_tokens` tokens needs in a pool of that state. cut: what
    blocks of attention may be cut into on their way.
    """

    tp: int
    kv_layout: KvLayout
    num_tokens: int
    pool: PoolState
    num_blocks: int | None
    base: int
    cut: Cut = "tokens"


def engine(grouping: Grouping, memory: Memory) -> Engine:
    """An engine as our connector sees it."""
    return _engine(grouping, memory, division_for(grouping, memory.kv_layout), with_padding=False)


def in_tree_engine(grouping: Grouping, memory: Memory) -> Engine:
    """An engine as vLLM's own connector sees it: short groups reach into all regions, states are cut into parts.

    ConfigError for states that it does not support.
    """
    divide = division_for(grouping, memory.kv_layout)

    def parts(layer: GroupLayer) -> tuple[int, ...]:
        cache = layer.layer.cache
        return _state_parts(layer, cache) if isinstance(cache, Recurrent) else divide(layer)

    return _engine(grouping, memory, parts, with_padding=True)


def _engine(grouping: Grouping, memory: Memory, divide: Division, *, with_padding: bool) -> Engine:
    tables = tuple(Table(group.kind, group.block_size) for group in grouping.groups)
    num_blocks = memory.num_blocks or pool_size(tables, memory.num_tokens, memory.pool)
    ranks = tuple(
        arena(
            grouping,
            rank=rank,
            tp=memory.tp,
            divide=divide,
            cut=memory.cut,
            num_blocks=num_blocks,
            base=memory.base,
            with_padding=with_padding,
        )
        for rank in range(memory.tp)
    )
    return Engine(
        tables=tables,
        ranks=ranks,
        data_bytes=tuple(tuple(layer.data_bytes for layer in group.layers) for group in grouping.groups),
        prefix_caching=grouping.prefix_caching,
    )


def _state_parts(layer: GroupLayer, cache: Recurrent) -> tuple[int, ...]:
    """Bytes of x, B and C (or value, key and query) and of the state; of a Mamba-1 layer only x and the state."""
    if cache.family not in IN_TREE_STATES:
        raise ConfigError(f"The in-tree connector does not move states like that of {layer.layer.name}.")
    conv, state = (prod(shape) * size for shape, size in zip(cache.shapes, cache.item_bytes, strict=True))
    if cache.family == "mamba1":
        return conv, state
    rows, width = cache.shapes[0]
    main = cache.shapes[1][0] * cache.shapes[1][1]
    other = (width - main) // 2 * rows * cache.item_bytes[0]
    return conv - 2 * other, other, other, state
