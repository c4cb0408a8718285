"""vLLM's own specs and tensors in the words of the plan; what is not understood is refused, naming the layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.engine.specs import check_groups, geometry_from, kind_of, layout_of, memory_of
from connector.errors import ConfigError
from connector.plan.geometry import Share
from connector.plan.kinds import ChunkedLocal, Full, Mla, SlidingWindow, State
from connector.transport.nixl import united

COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**COMMON)
WINDOW = SlidingWindowSpec(**COMMON, sliding_window=40)
BLOCKS, SHAPE = 10, (10, 2, 16, 16)


def cache(*groups: tuple[Any, list[str]]) -> Any:
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_layout="LBHNC",
        kv_cache_groups=[KVCacheGroupSpec(layer_names=layers, kv_cache_spec=spec) for spec, layers in groups],
    )


LATENT = MLAAttentionSpec(**COMMON | {"num_kv_heads": 1})
STATE = MambaSpec(block_size=16, shapes=((2, 3), (4,)), dtypes=(torch.float32, torch.float32))


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (FULL, Full()),
        (WINDOW, SlidingWindow(40)),
        (ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=128), ChunkedLocal(128)),
        (LATENT, Mla()),
        (STATE, State()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds(spec: Any, kind: Any) -> None:
    assert kind_of(spec, "a") == kind


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowMLASpec(**COMMON | {"num_kv_heads": 1}, sliding_window=40),
        CrossAttentionSpec(**COMMON),
        SinkFullAttentionSpec(**COMMON),
        EncoderOnlyAttentionSpec(**COMMON),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_another_kind_is_refused_at_start_naming_the_layer(spec: Any) -> None:
    """W12."""
    with pytest.raises(ConfigError, match=r"model\.layers\.3") as caught:
        check_groups(cache((FULL, ["a"]), (spec, ["model.layers.3"])))
    assert type(spec).__name__ in caught.value.message


def test_states_are_smaller_than_the_pages_beside_which_they_lie() -> None:
    """A state group overlays an attention group: one region, and only the state's own bytes move."""
    storage = torch.zeros(BLOCKS * 512, dtype=torch.float32)
    state = storage.view(torch.int8).as_strided((BLOCKS, 1, 1, 40), (2048, 40, 40, 1))
    tensors = {"f": storage.view(SHAPE), "m": state}
    geometry = geometry_from(cache((STATE, ["m"]), (FULL, ["f"])), tensors)
    assert len(geometry.regions) == 1 and geometry.regions[0].block_bytes == 2048
    assert [group.pages[0].num_bytes for group in geometry.groups] == [40, 2048]
    assert united(geometry.regions) == [(storage.data_ptr(), 4 * storage.numel(), 0)]


def test_blocks_that_are_cut_into_kernel_blocks() -> None:
    geometry = geometry_from(cache((FULL, ["a"])), {"a": torch.zeros(4 * BLOCKS, 2, 4, 16)})
    assert (geometry.groups[0].kernel_blocks, geometry.num_blocks) == (4, BLOCKS)
    with pytest.raises(ConfigError, match="kernel blocks"):
        geometry_from(cache((FULL, ["a", "b"])), {"a": torch.zeros(SHAPE), "b": torch.zeros(2 * BLOCKS, 2, 8, 16)})


@pytest.mark.parametrize(
    ("heads_a_rank", "heads", "ranks", "wanted"),
    [
        (2, 2, 1, [(0, 2, 2)]),
        (2, 4, 2, [(0, 2, 4), (2, 2, 4)]),
        (1, 2, 2, [(0, 1, 2), (1, 1, 2)]),
        (1, 1, 2, [(0, 1, 1), (0, 1, 1)]),
        (1, 2, 4, [(0, 1, 2), (0, 1, 2), (1, 1, 2), (1, 1, 2)]),
    ],
)
def test_what_each_rank_holds(heads_a_rank: int, heads: int, ranks: int, wanted: list[tuple[int, ...]]) -> None:
    spec = FullAttentionSpec(**COMMON | {"num_kv_heads": heads_a_rank})
    tensors = {"a": torch.zeros(BLOCKS, heads_a_rank, 16, 16), "m": torch.zeros(BLOCKS, 1, 1, 40, dtype=torch.int8)}
    for rank in range(ranks):
        made = geometry_from(cache((spec, ["a"]), (STATE, ["m"])), tensors, heads=heads, rank=rank, ranks=ranks)
        assert [group.share for group in made.groups] == [Share(*wanted[rank]), Share(rank, 1, ranks)]


def test_what_blocks_may_be_cut_into() -> None:
    """On the host vLLM keeps each head in an order of its own; states are never cut, nor tokens with heads inside."""
    state = torch.zeros(BLOCKS, 1, 1, 40, dtype=torch.int8)
    tensors = {"heads": torch.zeros(SHAPE), "tokens": torch.zeros(10, 16, 2, 16).permute(0, 2, 1, 3), "state": state}
    made = geometry_from(cache((FULL, ["heads"]), (WINDOW, ["tokens"]), (STATE, ["state"])), tensors)
    assert [group.cut for group in made.groups] == ["heads", "whole", "whole"]


def test_states_with_speculation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer\.5 keeps a state"):
        check_groups(cache((FULL, ["a"]), (STATE, ["layer.5"])), speculates=True)
    check_groups(cache((FULL, ["a"])), speculates=True)


def test_one_layer_s_pages_of_another_size_in_a_group_of_one_type() -> None:
    wide = FullAttentionSpec(**COMMON | {"head_size": 16})
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": wide})
    geometry = geometry_from(cache((group, ["a", "b"])), {"a": torch.zeros(SHAPE), "b": torch.zeros(10, 2, 16, 32)})
    assert [page.num_bytes for page in geometry.groups[0].pages] == [2048, 4096]


def test_layers_of_several_groups_share_a_region_and_a_short_group_has_no_last_one() -> None:
    first, second = torch.zeros(SHAPE), torch.zeros(SHAPE)
    tensors = {"f0": first, "f1": second, "s0": first, "s1": second, "t0": first}
    geometry = geometry_from(cache((FULL, ["f0", "f1"]), (WINDOW, ["s0", "s1"]), (WINDOW, ["t0"])), tensors)
    assert [[page.region for page in group.pages] for group in geometry.groups] == [[0, 1], [0, 1], [0]]
    assert [region.base for region in geometry.regions] == [first.data_ptr(), second.data_ptr()]
    assert geometry.regions[0].block_bytes == geometry.regions[0].stride == 2 * 16 * 16 * 4
    assert memory_of(tensors) == "DRAM"


def test_a_layer_that_reuses_an_earlier_cache_moves_once() -> None:
    tensor = torch.zeros(SHAPE)
    geometry = geometry_from(cache((FULL, ["own", "shared"])), {"own": tensor, "shared": tensor})
    assert [page.region for page in geometry.groups[0].pages] == [0]


def test_k_and_v_in_two_halves_are_two_regions() -> None:
    tensor = torch.zeros(2, BLOCKS, 16, 2, 8)
    geometry = geometry_from(cache((FULL, ["a"])), {"a": tensor})
    assert [page.region for page in geometry.groups[0].pages] == [0, 1]
    assert geometry.regions[1].base - geometry.regions[0].base == tensor.stride(0) * 4


def test_the_layout_tells_orders_inside_a_page_apart() -> None:
    heads_first = {"a": torch.zeros(SHAPE)}
    tokens_first = {"a": torch.zeros(10, 16, 2, 16).permute(0, 2, 1, 3)}
    assert tuple(heads_first["a"].shape) == tuple(tokens_first["a"].shape)
    config = cache((FULL, ["a"]))
    assert layout_of(config, heads_first) != layout_of(config, tokens_first)


def test_what_is_not_understood_is_refused_naming_the_layer() -> None:
    with pytest.raises(ConfigError, match="no KV cache for layer a"):
        geometry_from(cache((FULL, ["a"])), {})
    with pytest.raises(ConfigError, match="Layer a: Cannot tell the block dimension"):
        geometry_from(cache((FULL, ["a"])), {"a": torch.zeros(7, 2, 16, 16)})
    storage = torch.zeros(12 * 2 * 16 * 16)
    shifted = {"a": storage[:5120].view(SHAPE), "b": storage[512:5632].view(SHAPE)}
    with pytest.raises(ConfigError, match="overlap"):
        geometry_from(cache((FULL, ["a", "b"])), shifted)
    # Blocks of different groups are never the same block: their pages may overlay each other.
    assert len(geometry_from(cache((FULL, ["a"]), (WINDOW, ["b"])), shifted).regions) == 2


def test_pages_that_interleave_do_not_overlap() -> None:
    both = torch.zeros(BLOCKS, 2, 2, 16, 16)  # block-outermost: two layers in each block
    geometry = geometry_from(cache((FULL, ["a", "b"])), {"a": both[:, 0], "b": both[:, 1]})
    assert all(region.block_bytes < region.stride for region in geometry.regions)
