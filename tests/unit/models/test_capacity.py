"""What a cache holds, with and without HMA; equality with vLLM's functions is in `test_grouping_against_vllm`."""

from __future__ import annotations

import pytest

from connector.errors import ConfigError
from connector.plan.kinds import ChunkedLocal, Full, SlidingWindow, State
from hma_cli.models.caches import Attention, Cache, Layer, Recurrent
from hma_cli.models.capacity import Load, blocks_per_request, capacity
from hma_cli.models.grouping import EngineOptions, group_layers


def attention(kind: Full | SlidingWindow | ChunkedLocal) -> Attention:
    return Attention(kind=kind, heads=1, total_heads=1, head_size=32, head_size_v=32, item_bytes=2)


def stack(*caches: Cache) -> list[Layer]:
    return [Layer(index=index, part="attn", cache=cache) for index, cache in enumerate(caches)]


GEMMA = stack(*([attention(SlidingWindow(64))] * 5 + [attention(Full())]) * 2, attention(SlidingWindow(64)))


def test_a_real_engine_said_the_same() -> None:
    """A random Gemma 3 (13 layers, window 64) on CPU with 1 GiB: 131,072 blocks, concurrency 1110.78 at 512 tokens."""
    grouping = group_layers(GEMMA, EngineOptions(device="cpu", block_size=32))
    found = capacity(grouping, 1 << 30, Load(request_tokens=512, max_num_batched_tokens=512))
    assert (found.num_blocks, found.blocks_per_request) == (131_072, 6 * 17 + 16)
    assert found.concurrency == 1110.7796610169491
    assert found.tokens == 568_719


def test_without_hma_every_layer_keeps_every_token() -> None:
    load = Load(request_tokens=32_768, max_num_batched_tokens=512)
    with_hma = capacity(group_layers(GEMMA, EngineOptions()), 1 << 30, load)
    without = capacity(group_layers(GEMMA, EngineOptions(hma=False)), 1 << 30, load)
    assert without.blocks_per_request == 2048
    assert with_hma.blocks_per_request == 2048 + 6 * 37  # 63 + 512 tokens lie in 36 blocks, and one more
    assert with_hma.tokens / without.tokens == pytest.approx(13 / 2 * 2048 / 2270, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "tokens", "blocks"),
    [
        (Full(), 1000, 63),
        (SlidingWindow(64), 1000, 12 + 1),  # 63 + 128 tokens in flight
        (SlidingWindow(64), 100, 7 + 1),
        (ChunkedLocal(256), 1000, 24),  # 256 + 128
        (ChunkedLocal(256), 100, 7),
    ],
)
def test_blocks_of_one_kind(kind: Full | SlidingWindow | ChunkedLocal, tokens: int, blocks: int) -> None:
    grouping = group_layers(stack(attention(kind)), EngineOptions())
    assert blocks_per_request(grouping, Load(request_tokens=tokens, max_num_batched_tokens=128)) == blocks


def test_two_steps_under_way_hold_twice_the_tokens() -> None:
    grouping = group_layers(stack(attention(SlidingWindow(64))), EngineOptions())
    load = Load(request_tokens=10_000, max_num_batched_tokens=64, concurrent_batches=2)
    assert blocks_per_request(grouping, load) == 12 + 1


@pytest.mark.parametrize(
    ("family", "prefix_caching", "blocks"),
    [("gdn", True, 2), ("mamba2", True, 3), ("gdn", False, 1), ("mamba2", False, 1)],
)
def test_a_request_holds_few_states_whatever_its_length(family: str, prefix_caching: bool, blocks: int) -> None:
    state = Recurrent(kind=State(), shapes=((64,),), item_bytes=(2,), family=family)
    options = EngineOptions(prefix_caching=prefix_caching, max_model_len=4096)
    grouping = group_layers(stack(attention(Full()), state), options)
    assert blocks_per_request(grouping, Load(request_tokens=1600, max_num_batched_tokens=128)) == 100 + blocks


def test_too_little_memory_holds_nothing() -> None:
    found = capacity(group_layers(GEMMA, EngineOptions()), 100, Load(request_tokens=512, max_num_batched_tokens=512))
    assert (found.num_blocks, found.concurrency, found.tokens) == (0, 0.0, 0)


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        Load(request_tokens=0, max_num_batched_tokens=1)
