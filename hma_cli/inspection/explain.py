"""One group's arithmetic, step by step."""

from __future__ import annotations

from collections.abc import Iterator

from connector.errors import ConfigError
from connector.plan.kinds import ChunkedLocal, Kind, SlidingWindow, State, blocks_covering
from hma_cli.inspection.inspect import Inspection
from hma_cli.models.caches import Attention, Latent, Recurrent
from hma_cli.models.grouping import CacheGroup, GroupLayer


def explain(found: Inspection, index: int) -> str:
    """The way from the layers to the figures of group `index`. ConfigError when there is no such group."""
    groups = found.decode.groups
    if not 0 <= index < len(groups):
        raise ConfigError(f"There is no group {index}.", remedy=f"Give --explain from 0 to {len(groups) - 1}.")
    return "\n".join(_lines(found, index, groups[index]))


def _lines(found: Inspection, index: int, group: CacheGroup) -> Iterator[str]:
    planned, case, block = found.plan.groups[index], found.case, group.block_size
    numbers = ", ".join(str(layer.layer.index) for layer in group.layers)
    yield f"Group {index}: {group.kind.name}, {len(group.layers)} layers ({numbers}), blocks of {block:,} tokens"
    for layer in dict.fromkeys(_page(layer, block) for layer in group.layers):
        yield f"  page         {layer}"
    n = case.handed_tokens
    yield (
        f"  handed over  the prompt has {case.prompt_tokens:,} tokens; P computes {n:,}, D loads them and computes the "
        "last one"
    )
    live = planned.live
    yield f"  live         {_live(group.kind, n)}"
    if not live:
        yield "  moves        nothing"
        return
    cover = blocks_covering(live, block)
    yield (
        f"  blocks       {live.start:,} // {block:,} = {cover.start:,} … {live.stop - 1:,} // {block:,} = "
        f"{cover.stop - 1:,}: {len(cover):,} of {-(-case.prompt_tokens // block):,}"
    )
    if case.cached_tokens:
        kept = max(cover.start, case.cached_tokens // block)
        yield (
            f"  cached on D  {case.cached_tokens:,} tokens = {case.cached_tokens // block:,} blocks, so positions from "
            f"{kept:,} on move: {max(0, cover.stop - kept):,}"
        )
    yield f"  descriptors  {_descriptors(found, index)}"
    yield f"  bytes        {planned.amount.num_bytes:,}"
    if isinstance(group.kind, SlidingWindow):
        window = group.kind.window
        yield (
            f"  in-tree      ceil({window:,} / {block:,}) + 1 = {-(-window // block) + 1:,} blocks, whatever of them "
            "is live"
        )
    elif isinstance(group.kind, ChunkedLocal):
        yield "  in-tree      does not clip chunks: all blocks, dead ones among them"


def _page(layer: GroupLayer, block: int) -> str:
    cache = layer.layer.cache
    padding = "" if layer.data_bytes == layer.page_bytes else f" of {layer.page_bytes:,} allocated"
    match cache:
        case Attention():
            return (
                f"{block:,} tokens × {cache.heads} KV heads × ({cache.head_size} + {cache.head_size_v}) elements × "
                f"{cache.item_bytes} bytes = {layer.data_bytes:,} bytes{padding}"
            )
        case Latent():
            share = "" if cache.tokens_per_state == 1 else f" / {cache.tokens_per_state} tokens a latent"
            return f"{block:,} tokens{share} × {cache.state_bytes:,} bytes = {layer.data_bytes:,} bytes{padding}"
        case Recurrent():
            parts = " + ".join(
                f"{' × '.join(map(str, shape))} × {size} bytes"
                for shape, size in zip(cache.shapes, cache.item_bytes, strict=True)
            )
            return f"{parts} = {layer.data_bytes:,} bytes{padding}"


def _live(kind: Kind, n: int) -> str:
    live = kind.live_range(n)
    if not live:
        return f"position {n:,} reads nothing from this cache"
    span = f"{live.start:,} … {live.stop - 1:,} ({len(live):,} tokens)"
    match kind:
        case State():
            return f"the state after position {n - 1:,}"
        case ChunkedLocal(chunk):
            return f"position {n:,} reads its own chunk of {chunk:,} up to itself: {span}"
    if kind.window is not None:
        return f"position {n:,} reads the last {kind.window:,} positions, itself among them: {span}"
    return f"position {n:,} reads all before it: {span}"


def _descriptors(found: Inspection, index: int) -> str:
    """Pages are cut into pieces where the two sides order heads or tokens otherwise."""
    planned, ranks = found.plan.groups[index], found.case.decode.ranks
    amount, pages = planned.amount, len(ranks[0].groups[index].pages)
    pieces = amount.descriptors // max(1, len(planned.pairs) * pages * len(ranks))
    return (
        f"{len(planned.pairs):,} pairs of blocks × {pages:,} pages"
        f"{f' × {len(ranks):,} ranks of D' if len(ranks) > 1 else ''}"
        f"{f' × {pieces:,} pieces of a page' if pieces > 1 else ''}"
        f" = {amount.descriptors:,}, in {amount.runs:,} runs"
    )
