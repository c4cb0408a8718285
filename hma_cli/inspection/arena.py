"""The memory of one engine rank as vLLM would lay it out, without the memory: groups into regions and pages.

Layer-compact (vLLM's LB… layouts): the i-th layers of all groups share one region. Block-outermost (BL…): one region,
in whose blocks the layers of a group lie one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from connector.errors import ConfigError
from connector.plan.geometry import Cut, Geometry, Group, Page, Region, Share
from connector.plan.kinds import State
from hma_cli.models.caches import Attention, Latent, Recurrent
from hma_cli.models.grouping import CacheGroup, Grouping, GroupLayer


class KvLayout(StrEnum):
    """Whether K and V of a token lie in one page (vLLM 0.32) or in two regions (older releases)."""

    PACKED = "packed"
    SPLIT = "split"


Division = Callable[[GroupLayer], tuple[int, ...]]
"""A layer's page divided into the byte lengths of its parts, from its start."""


def arena(
    grouping: Grouping,
    *,
    rank: int,
    tp: int,
    divide: Division,
    num_blocks: int,
    base: int = 0,
    cut: Cut = "tokens",
    with_padding: bool = False,
) -> Geometry:
    """The geometry of one rank.

    divide: how a layer's page is divided, see `division_for`. num_blocks: in the pool, the null block among them. base:
    address of the first region, bytes. cut: what blocks of attention may be cut into on their way. with_padding: short
    groups reach into regions where they have no layer, as vLLM's own connector lets them.
    """
    if grouping.layout == "block_outermost":
        stride = grouping.bytes_per_block
        whole = Region(base=base, stride=stride, block_bytes=stride, num_blocks=num_blocks)
        groups = [_group(group, rank, tp, cut, _in_one_block(group, divide)) for group in grouping.groups]
        return Geometry((whole,), tuple(groups))
    slots = _slots(grouping, with_padding)
    strides = [
        max(group[slot].page_bytes for group in slots if slot < len(group)) for slot in range(max(map(len, slots)))
    ]
    split = all(len(set(divide(layer))) == 1 and len(divide(layer)) == 2 for group in slots for layer in group)
    if split:
        strides = [stride // 2 for stride in strides for _ in range(2)]
    regions = _regions(strides, num_blocks, base)
    return Geometry(
        regions,
        tuple(
            _group(group, rank, tp, cut, _two_regions(layers, divide) if split else _one_region(layers, divide))
            for group, layers in zip(grouping.groups, slots, strict=True)
        ),
    )


def division_for(grouping: Grouping, kv_layout: KvLayout) -> Division:
    """How pages are divided under `kv_layout`. ConfigError where K and V cannot lie apart."""
    if kv_layout is KvLayout.PACKED:
        return _whole
    for group in grouping.groups:
        for layer in group.layers:
            cache = layer.layer.cache
            if isinstance(cache, Recurrent):
                raise ConfigError(
                    f"{layer.layer.name} keeps a state, and beside states vLLM keeps K and V in one page.",
                    remedy="Use --kv-layout packed.",
                )
            if isinstance(cache, Attention) and cache.head_size != cache.head_size_v:
                raise ConfigError(
                    f"{layer.layer.name} has keys of {cache.head_size} and values of {cache.head_size_v} elements, "
                    "which do not divide a page into halves.",
                    remedy="Use --kv-layout packed.",
                )
    return _halves


def moved_bytes(layer: GroupLayer) -> int:
    """Bytes of a page that move: all that carry KV or state. A latent page's rounding belongs to its format."""
    return layer.page_bytes if isinstance(layer.layer.cache, Latent) else layer.data_bytes


def _whole(layer: GroupLayer) -> tuple[int, ...]:
    return (moved_bytes(layer),)


def _halves(layer: GroupLayer) -> tuple[int, ...]:
    if not isinstance(layer.layer.cache, Attention):
        return (moved_bytes(layer),)
    return (moved_bytes(layer) // 2,) * 2


def _slots(grouping: Grouping, with_padding: bool) -> list[tuple[GroupLayer, ...]]:
    """Each group's layers by region; with padding, short groups repeat their last layer."""
    if not with_padding:
        return [group.layers for group in grouping.groups]
    return [
        (*group.layers, *[group.layers[-1]] * (reach - len(group.layers)))
        for group, reach in zip(grouping.groups, _in_tree_reach(grouping), strict=True)
    ]


def _in_tree_reach(grouping: Grouping) -> list[int]:
    """Into how many regions vLLM's own connector reaches for each group: `_compute_desc_ids` in `nixl/base_worker.py`.

    A region belongs to one group or is shared, and then every group moves there. Beside states, attention moves in all
    regions and states in all that hold one. Example: groups of 9, 8 and 10 layers share 9 regions: 9, 9 and 10.
    """
    lengths = [len(group.layers) for group in grouping.groups]
    states = [len(group.layers) for group in grouping.groups if group.kind == State()]
    if states:
        return [max(states) if group.kind == State() else max(lengths) for group in grouping.groups]
    shared = sorted(lengths)[-2] if len(lengths) > 1 else 0
    return [max(length, shared) for length in lengths]


def _regions(strides: Sequence[int], num_blocks: int, base: int) -> tuple[Region, ...]:
    regions = []
    for stride in strides:
        regions.append(Region(base=base, stride=stride, block_bytes=stride, num_blocks=num_blocks))
        base += stride * num_blocks
    return tuple(regions)


def _in_one_block(group: CacheGroup, divide: Division) -> Iterable[Page]:
    offset = 0
    for layer in group.layers:
        yield from _parts(0, offset, divide(layer))
        offset += layer.page_bytes


def _one_region(layers: Sequence[GroupLayer], divide: Division) -> Iterable[Page]:
    for slot, layer in enumerate(layers):
        yield from _parts(slot, 0, divide(layer))


def _two_regions(layers: Sequence[GroupLayer], divide: Division) -> Iterable[Page]:
    for slot, layer in enumerate(layers):
        for half, size in enumerate(divide(layer)):
            yield Page(2 * slot + half, 0, size)


def _parts(region: int, offset: int, sizes: Iterable[int]) -> Iterable[Page]:
    for size in sizes:
        yield Page(region, offset, size)
        offset += size


def _group(group: CacheGroup, rank: int, tp: int, cut: Cut, pages: Iterable[Page]) -> Group:
    return Group(
        kind=group.kind,
        block_size=group.block_size,
        layers=tuple(layer.layer.name for layer in group.layers),
        pages=tuple(pages),
        share=_share(group, rank, tp),
        cut="whole" if group.kind == State() else cut,
    )


def _share(group: CacheGroup, rank: int, tp: int) -> Share:
    """What rank `rank` of `tp` holds of a group."""
    if group.kind == State():
        return Share(rank, 1, tp)
    cache = group.layers[0].layer.cache
    if not isinstance(cache, Attention):
        return Share()
    return Share(rank * cache.total_heads // tp, cache.heads, cache.total_heads)
