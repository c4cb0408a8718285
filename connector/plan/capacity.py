"""KV capacity with and without the hybrid memory allocator, from the geometry alone."""

from __future__ import annotations

from dataclasses import dataclass

from connector.plan.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens of requests of `request_tokens` length that fit the cache at once, with HMA and without it."""

    request_tokens: int
    hma_tokens: int
    full_tokens: int

    @property
    def gain(self) -> float:
        """How many times more requests fit with HMA; 1.0 where it brings nothing."""
        return self.hma_tokens / self.full_tokens if self.full_tokens else 1.0


def capacity(geometry: Geometry, request_tokens: int) -> Capacity:
    """Count requests of `request_tokens` tokens in this cache.

    With HMA a request holds, per group, the blocks of its live range and one block in the making; all groups draw on
    one pool. Without HMA every layer keeps every token: a block costs the pages of all layers, from the same bytes.
    Chunks of a running prefill are left out on both sides, so that the comparison is of resident requests.
    """
    usable = max(geometry.num_blocks - 1, 0)  # block 0 is the null block
    need = full_need = 0
    for group in geometry.groups:
        all_blocks = -(-request_tokens // group.block_size)
        live = len(group.kind.live_range(request_tokens))
        need += min(-(-live // group.block_size) + 1, all_blocks)
        full_need += all_blocks * group.block_bytes
    pool_bytes = usable * sum(region.block_bytes for region in geometry.regions)
    return Capacity(
        request_tokens,
        int(usable / need * request_tokens) if need else 0,
        int(pool_bytes / full_need * request_tokens) if full_need else 0,
    )
