"""Layers into vLLM 0.32's KV-cache groups.

Source: `get_kv_cache_groups` in `v1/core/kv_cache_utils.py` and what it calls. In its order: without HMA every layer
is allocated as full attention; layers of one family and block size are one group; where blocks lie outermost, pages of
different sizes are packed (`packing`); else all pages are made equal, layers that are alike fall into one bucket, and
buckets are cut into groups of about the same number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from connector.errors import ConfigError
from connector.plan.kinds import Full, Kind, Mla, SlidingWindow
from hma_cli.models.blocks import Blocks, EngineOptions, MemoryLayout, blocks_of, require_block
from hma_cli.models.caches import Layer
from hma_cli.models.packing import packed
from hma_cli.models.pages import Paged, PageMisfit

__all__ = ["CacheGroup", "EngineOptions", "GroupLayer", "Grouping", "MemoryLayout", "group_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayer:
    """One layer in a group. page_bytes: as vLLM allocates it. data_bytes: of these, bytes that carry KV or state."""

    layer: Layer
    page_bytes: int
    data_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers with one block table. kind: how blocks are kept, which for promoted layers is not the layer's own kind.

    block_size: tokens. Without prefix caching a state's block spans the whole sequence. checkpoints: blocks that a
    request may hold in prefill beyond those it needs otherwise.
    """

    kind: Kind
    block_size: int
    layers: tuple[GroupLayer, ...]
    checkpoints: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the group."""
        return sum(layer.page_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """All groups of one rank, in vLLM's order.

    bytes_per_block: of the pool that all groups draw on. scheduler_block_size: tokens, the least common multiple of
    the groups' blocks. prefix_caching: decides how many states a request holds. notes: what was decided, in words.
    """

    groups: tuple[CacheGroup, ...]
    layout: MemoryLayout
    bytes_per_block: int
    scheduler_block_size: int
    hma: bool
    prefix_caching: bool
    notes: tuple[str, ...]


def group_layers(layers: Sequence[Layer], options: EngineOptions) -> Grouping:
    """The groups that a vLLM 0.32 engine with `options` forms of `layers` (of one rank, in the order of the model).

    ConfigError for combinations that vLLM refuses.
    """
    if not layers:
        raise ConfigError("A model without a KV cache has no groups.")
    blocks = blocks_of(layers, options)
    notes = list(blocks.notes)
    members = _members(blocks, options, notes)
    groups = tuple(_group(pages) for pages in members)
    for pages in members:
        for page in pages:
            backend = blocks.kernels.of(page.layer)
            if backend is not None and page.token_based:
                require_block(backend, page.block_size, page.layer)
    return Grouping(
        groups=groups,
        layout=blocks.layout,
        bytes_per_block=max(group.block_bytes for group in groups),
        scheduler_block_size=lcm(*(group.block_size for group in groups)),
        hma=options.hma,
        prefix_caching=blocks.prefix_caching,
        notes=tuple(notes),
    )


def _group(pages: Sequence[Paged]) -> CacheGroup:
    kinds = dict.fromkeys(page.kind for page in pages)
    return CacheGroup(
        # Latents beside full attention in one table: all of them keep every token.
        kind=next(iter(kinds)) if len(kinds) == 1 else Full(),
        block_size=pages[0].block_size,
        checkpoints=pages[0].checkpoints,
        layers=tuple(
            GroupLayer(layer=page.layer, page_bytes=page.page_bytes, data_bytes=page.data_bytes) for page in pages
        ),
    )


def _members(blocks: Blocks, options: EngineOptions, notes: list[str]) -> list[list[Paged]]:
    pages = list(blocks.pages) if options.hma else _without_hma(blocks.pages, notes)
    if _one_table(pages):
        return [pages]
    if blocks.layout == "block_outermost" and len({page.page_bytes for page in pages}) > 1:
        return packed(pages)
    try:
        return _cut(_equal_pages(pages, notes), notes)
    except PageMisfit:
        promoted = _promoted_beside_latents(pages)
        if promoted is None:
            raise
        notes.append("pages cannot be made equal: layers with a window are allocated as full attention")
        return [promoted]


def _one_table(pages: Sequence[Paged]) -> bool:
    return len({(page.family, page.block_size) for page in pages}) == 1


def _without_hma(pages: Sequence[Paged], notes: list[str]) -> list[Paged]:
    """All layers in one table: those that keep only what is near are allocated as full attention.

    vLLM: `_promote_local_kv_cache_specs`. A model of one kind alone is left as it is.
    """
    if _one_table(pages):
        return list(pages)
    promoted = _promoted(pages)
    named = [page.kind.name for page in pages if page.family != Full() and not page.promotable]
    if named:
        raise ConfigError(
            f"Layers of kind {named[0]} cannot be allocated as full attention, so vLLM 0.32 does not start this model "
            "without HMA (it fails to promote local KV cache specs to one unified type).",
            remedy="Leave HMA on.",
        )
    if not _one_table(promoted):
        raise ConfigError(
            "Without HMA all layers share one block table, and vLLM 0.32 finds no full attention with one block size "
            "that these layers could be allocated as.",
            remedy="Leave HMA on.",
        )
    _require_one_reach(pages)
    notes.append(f"allocated as full attention without HMA: {_layers(sum(page.promotable for page in pages))}")
    return promoted


def _promoted(pages: Sequence[Paged]) -> list[Paged]:
    """Every layer as full attention, in the blocks of the model's own full attention where there is one block size."""
    sizes = {page.block_size for page in pages if page.family == Full()}
    if not sizes:
        return list(pages)
    shared = sizes.pop() if len(sizes) == 1 else None
    return [page.promoted(shared or page.block_size) if page.promotable else page for page in pages]


def _require_one_reach(pages: Sequence[Paged]) -> None:
    """vLLM merges full attention with one window and one chunk; latents in the table spare it the merge."""
    if any(page.kind == Mla() for page in pages):
        return
    for word, found in (
        ("windows", sorted({page.kind.window for page in pages if page.kind.window is not None})),
        ("chunks", sorted({page.kind.chunk for page in pages if page.kind.chunk is not None})),
    ):
        if len(found) > 1:
            raise ConfigError(
                f"Without HMA vLLM 0.32 takes one size for all layers; this model has {word} of "
                f"{' and '.join(map(str, found))} tokens.",
                remedy="Leave HMA on.",
            )


def _promoted_beside_latents(pages: Sequence[Paged]) -> list[Paged] | None:
    """One table of latents and promoted windowed layers, or None.

    vLLM: `_try_get_full_allocation_fallback_groups`, for a drafter with windows beside a model of latents.
    """
    local = [page for page in pages if page.promotable]
    latents = any(page.kind == Mla() for page in pages)
    if not latents or not local or any(page.kind.name != SlidingWindow.name for page in local):
        return None
    promoted = _promoted(pages)
    return promoted if _one_table(promoted) else None


def _equal_pages(pages: Sequence[Paged], notes: list[str]) -> list[Paged]:
    """All pages as large as the largest. vLLM: `unify_kv_cache_spec_page_size`."""
    target = max(page.page_bytes for page in pages)
    equal = [page if page.page_bytes == target else page.filling(target) for page in pages]
    said: dict[str, int] = {}
    for old, new in zip(pages, equal, strict=True):
        if new.block_size != old.block_size:
            note = f"block size {old.block_size} of {new.kind.name} layers raised to {new.block_size}"
        elif new.page_bytes != old.page_bytes:
            note = f"pages of {old.page_bytes:,} bytes of {new.kind.name} layers padded"
        else:
            continue
        said[note] = said.get(note, 0) + 1
    notes += [f"{note}: all pages become {target:,} bytes ({_layers(count)})" for note, count in said.items()]
    return equal


def _cut(pages: Sequence[Paged], notes: list[str]) -> list[list[Paged]]:
    """Buckets of layers that are alike, cut into groups. vLLM: `_get_kv_cache_groups_uniform_page_size`.

    The smallest bucket gives the group size, unless the largest is less than half as large again: then that one does.
    Groups take every n-th layer of a bucket, so that each pipeline stage has some of each. Example: 29 sliding and
    5 full layers: groups of 5, so six sliding groups (0, 6, 12, …), (1, 7, 13, …), …, the last one layer short.
    """
    found: dict[object, list[Paged]] = {}
    for page in pages:
        found.setdefault(page.identity, []).append(page)
    buckets = list(found.values())
    smallest, largest = min(map(len, buckets)), max(map(len, buckets))
    size = largest if 2 * largest < 3 * smallest else smallest
    groups: list[list[Paged]] = []
    for bucket in buckets:
        num_groups = -(-len(bucket) // size)
        groups += [bucket[i::num_groups] for i in range(num_groups)]
    widest = max(map(len, groups))
    for index, group in enumerate(groups):
        if len(group) < widest:
            short = widest - len(group)
            unused = f"{short / widest:.0%}"
            notes.append(f"group {index} is {_layers(short)} short: its blocks leave {unused} of their bytes unused")
    return groups


def _layers(count: int) -> str:
    return "one layer" if count == 1 else f"{count} layers"
