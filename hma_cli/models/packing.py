"""Groups where blocks lie outermost in memory: pages of different sizes share a block, so none is made equal.

Source: `_get_packed_kv_cache_groups` in vLLM 0.32's `v1/core/kv_cache_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connector.errors import ConfigError
from connector.plan.kinds import State
from hma_cli.models.pages import Paged


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers that may share a block table, by page size in order of first appearance."""

    layers: tuple[Paged, ...]

    @property
    def by_page(self) -> tuple[tuple[Paged, ...], ...]:
        pages = dict.fromkeys(layer.page_bytes for layer in self.layers)
        return tuple(tuple(layer for layer in self.layers if layer.page_bytes == page) for page in pages)

    @property
    def repeats(self) -> int:
        """Layers of the most frequent page size: how often the pattern repeats where `balanced`."""
        return max(len(layers) for layers in self.by_page)

    @property
    def balanced(self) -> bool:
        """Whether every page size occurs equally often, so that the bucket is one pattern repeated."""
        return len({len(layers) for layers in self.by_page}) == 1

    def widest(self, num_groups: int) -> int:
        """Bytes of a block in the widest of `num_groups` groups."""
        return sum(-(-len(layers) // num_groups) * layers[0].page_bytes for layers in self.by_page)

    def split(self, num_groups: int) -> list[list[Paged]]:
        """The bucket in `num_groups` groups; ConfigError where vLLM would lose layers."""
        if num_groups == 1:
            return [list(self.layers)]
        if not self.balanced:
            raise ConfigError(
                f"Layers of kind {self.layers[0].kind.name} have pages of different sizes in unequal numbers; vLLM "
                "0.32 leaves some of them without a group when blocks lie outermost.",
                remedy="Use --memory-layout layer-compact.",
            )
        patterns = list(zip(*self.by_page, strict=True))
        return [[layer for pattern in patterns[i::num_groups] for layer in pattern] for i in range(num_groups)]


def packed(layers: Sequence[Paged]) -> list[list[Paged]]:
    """Groups of `layers` whose pages differ in size.

    Buckets that mix page sizes evenly stay whole and say how many repeats of a pattern a group takes. Layers that keep
    little (states; windows where no bucket mixes sizes) are cut so that they do not widen the block.
    """
    buckets = _buckets(layers)
    mixed = [bucket.repeats for bucket in buckets if bucket.balanced and len(bucket.by_page) > 1]
    repeats = _least_padding([b.repeats for b in buckets if b.balanced], at_least=max(mixed)) if mixed else None

    def pattern_groups(bucket: Bucket) -> int:
        return -(-bucket.repeats // repeats) if repeats and bucket.balanced else 1

    def cut(bucket: Bucket) -> bool:
        kind = bucket.layers[0].kind
        return kind == State() or (repeats is None and kind.window is not None)

    anchor = max(bucket.widest(len(bucket.layers) if cut(bucket) else pattern_groups(bucket)) for bucket in buckets)
    groups: list[list[Paged]] = []
    for bucket in buckets:
        num_groups = pattern_groups(bucket)
        if cut(bucket):
            fitting = max(anchor // bucket.layers[0].page_bytes, 1)
            num_groups = max(num_groups, -(-len(bucket.layers) // fitting))
        groups += bucket.split(num_groups)
    return groups


def _buckets(layers: Sequence[Paged]) -> list[Bucket]:
    found: dict[object, list[Paged]] = {}
    for layer in layers:
        found.setdefault((layer.family, layer.block_size), []).append(layer)
    return [Bucket(tuple(bucket)) for bucket in found.values()]


def _least_padding(counts: Sequence[int], *, at_least: int) -> int:
    """The group size from `at_least` on that leaves the fewest slots empty; the largest such.

    Example: 22 and 21 layers, at least 5: sizes 11 and 22 both leave one slot empty; 22 it is.
    """
    sizes = range(at_least, max(counts) + 1)
    return min(reversed(sizes), key=lambda size: sum(-count % size for count in counts))
