"""How many requests a KV cache of a given size holds, as vLLM 0.32 counts at start-up.

Sources: `_max_memory_usage_bytes_from_groups`, `get_max_concurrency_for_kv_cache_config` and `get_kv_cache_capacity` in
`v1/core/kv_cache_utils.py`; the blocks that a request may hold in a group are the specs' own
`max_admission_blocks_per_request` and `max_memory_usage_bytes` (`v1/kv_cache_interface.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from connector.errors import ConfigError
from connector.plan.kinds import State
from hma_cli.models.grouping import CacheGroup, Grouping


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs at once, as far as it decides how many blocks a request may hold.

    request_tokens: of one request (vLLM counts with its maximum model length). max_num_batched_tokens: in one step.
    concurrent_batches: steps under way at once; vLLM has two with asynchronous scheduling.
    """

    request_tokens: int
    max_num_batched_tokens: int
    concurrent_batches: int = 1

    def __post_init__(self) -> None:
        if min(self.request_tokens, self.max_num_batched_tokens, self.concurrent_batches) < 1:
            raise ConfigError("Tokens of a request, tokens of a step and steps under way must each be at least one.")

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that are scheduled while their blocks cannot be freed yet."""
        return self.concurrent_batches * self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Requests of `request_tokens` tokens that a cache of `num_blocks` blocks holds at once."""

    request_tokens: int
    num_blocks: int
    blocks_per_request: int

    @property
    def concurrency(self) -> float:
        """Requests at once; vLLM prints it as "Maximum concurrency"."""
        return self.num_blocks / self.blocks_per_request

    @property
    def tokens(self) -> int:
        """Tokens of all these requests; vLLM prints it as "KV cache size"."""
        return int(self.concurrency * self.request_tokens)


def capacity(grouping: Grouping, memory_bytes: int, load: Load) -> Capacity:
    """What `memory_bytes` of cache on every rank hold. The null block is counted, as vLLM does."""
    return Capacity(
        request_tokens=load.request_tokens,
        num_blocks=memory_bytes // grouping.bytes_per_block,
        blocks_per_request=blocks_per_request(grouping, load),
    )


def resident(grouping: Grouping, memory_bytes: int, num_tokens: int) -> Capacity:
    """Requests of `num_tokens` computed tokens that `memory_bytes` of cache on every rank hold while they decode.

    A request then holds, per group, the blocks of its live range and one in the making: what a decode engine holds most
    of the time. vLLM's own count at start-up (`capacity`) is of the worst moment, a prefill step under way.
    """
    held = 0
    for group in grouping.groups:
        live, every = len(group.kind.live_range(num_tokens)), -(-num_tokens // group.block_size)
        held += min(-(-live // group.block_size) + 1, every)
    return Capacity(
        request_tokens=num_tokens, num_blocks=memory_bytes // grouping.bytes_per_block, blocks_per_request=held
    )


def blocks_per_request(grouping: Grouping, load: Load) -> int:
    """Blocks of the pool that one request may hold at once, over all groups."""
    return sum(_group_blocks(group, grouping, load) for group in grouping.groups)


def _group_blocks(group: CacheGroup, grouping: Grouping, load: Load) -> int:
    """Example: a window of 1,024, steps of 2,048 tokens, blocks of 16: 1,023 + 2,048 tokens lie in 192 blocks, and one
    more where the window does not begin with a block.
    """
    kind = group.kind
    if kind == State():
        return 2 + group.checkpoints if grouping.prefix_caching else 1
    if kind.window is not None:
        kept = min(kind.window - 1 + load.in_flight_tokens, load.request_tokens)
        return -(-kept // group.block_size) + 1
    kept = load.request_tokens
    if kind.chunk is not None:
        kept = min(kind.chunk + load.in_flight_tokens, kept)
    return -(-kept // group.block_size)
