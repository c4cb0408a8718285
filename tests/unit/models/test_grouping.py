"""Groups of the published models equal vLLM 0.32's; the rules, one by one, on layers made by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from connector.errors import ConfigError
from connector.plan.kinds import ChunkedLocal, Full, Kind, Mla, SlidingWindow, State
from hma_cli.models.architectures import layers_of
from hma_cli.models.caches import Attention, Cache, Latent, Layer, Recurrent
from hma_cli.models.grouping import CacheGroup, EngineOptions, Grouping, GroupLayer, group_layers
from hma_cli.models.lookup import find
from hma_cli.models.options import RankOptions

EXPECTED_FILE = Path(__file__).parents[4] / "shared" / "data" / "expected_groups.json"
EXPECTED: dict[str, Any] = json.loads(EXPECTED_FILE.read_text()) if EXPECTED_FILE.is_file() else {}
MAX_MODEL_LEN = 1_000_000
ENGINES = {
    "block16": EngineOptions(block_size=16, max_model_len=MAX_MODEL_LEN),
    "block128_cpu": EngineOptions(device="cpu", block_size=128, max_model_len=MAX_MODEL_LEN),
    "block16_BLHNC": EngineOptions(block_size=16, layout="block_outermost", max_model_len=MAX_MODEL_LEN),
}
# The figures were made with the file's float32, which vLLM serves in 16 bits unless --dtype says otherwise.
DTYPES = {"state-spaces/mamba-2.8b-hf": "float32"}
NAMES: dict[type, tuple[str, str]] = {
    Full: ("full_attention", "FullAttention"),
    SlidingWindow: ("sliding_window", "SlidingWindow"),
    ChunkedLocal: ("chunked_local_attention", "ChunkedLocalAttention"),
    State: ("mamba", "Mamba"),
    Mla: ("mla_attention", "MLAAttention"),
}
CASES = [
    pytest.param(model, engine, id=f"{model}-{engine}")
    for model, engines in EXPECTED.items()
    if not model.startswith("_")
    for engine in engines
]
published = pytest.mark.skipif(not CASES, reason="expected_groups.json is not here")


def grouped(model: str, engine: EngineOptions) -> Grouping:
    layers = layers_of(find(model, offline=True), RankOptions(dtype=DTYPES.get(model)))
    return group_layers(layers, engine)


def kind_name(group: CacheGroup) -> str:
    return "sliding_window_mla" if group.kind == Mla(group.kind.window or 1) else NAMES[type(group.kind)][0]


def in_order(groups: Iterable[CacheGroup]) -> list[list[object]]:
    """[kind, layers, block size, how many such groups], in order of first appearance, as the file has them."""
    found: dict[tuple[object, ...], int] = {}
    for group in groups:
        block_size = "max_model_len" if group.block_size == MAX_MODEL_LEN else group.block_size
        key = (kind_name(group), len(group.layers), block_size)
        found[key] = found.get(key, 0) + 1
    return [[*key, count] for key, count in found.items()]


@published
def test_the_file_has_all_models() -> None:
    assert len(EXPECTED) - 1 == 49
    assert sum(len(engines) for model, engines in EXPECTED.items() if model != "_about") == len(CASES) == 96


@published
@pytest.mark.parametrize(("model", "engine"), CASES)
def test_a_published_model_is_grouped_as_vllm_groups_it(model: str, engine: str) -> None:
    expected = EXPECTED[model][engine]
    found = grouped(model, ENGINES[engine])
    layers = [layer for group in found.groups for layer in group.layers]
    assert in_order(found.groups) == expected["groups"]
    assert [len(group.layers) for group in found.groups] == expected["group_sizes"]
    assert sorted({layer.page_bytes for layer in layers}) == expected["page_size_bytes"]
    assert found.bytes_per_block == expected["bytes_per_block"]
    scheduler = found.scheduler_block_size
    assert ("max_model_len" if scheduler == MAX_MODEL_LEN else scheduler) == expected["scheduler_block_size"]
    states = {layer.data_bytes for layer in layers if layer.layer.kind == State()}
    assert states == ({expected["mamba_page"]} if "mamba_page" in expected else set())


@published
@pytest.mark.parametrize(("model", "engine"), CASES)
def test_a_published_model_without_hma_is_one_group_or_refused(model: str, engine: str) -> None:
    expected = EXPECTED[model][engine]["hma_disabled"]
    options = ENGINES[engine]
    options = EngineOptions(
        block_size=options.block_size, device=options.device, layout=options.layout, hma=False, max_model_len=10**6
    )
    if isinstance(expected, str):  # vLLM's exception
        with pytest.raises(ConfigError, match="HMA"):
            grouped(model, options)
        return
    found = grouped(model, options)
    assert [f"{NAMES[type(g.kind)][1]}x{len(g.layers)}@{g.block_size}" for g in found.groups] == expected
    assert not found.hma


# -- the rules, by hand ----------------------------------------------------------------------------------------------


def attention(kind: Full | SlidingWindow | ChunkedLocal, heads: int = 2, size: int = 64, value: int = 0) -> Attention:
    return Attention(kind=kind, heads=heads, total_heads=heads, head_size=size, head_size_v=value or size, item_bytes=2)


FULL, SLIDING, CHUNKED = attention(Full()), attention(SlidingWindow(64)), attention(ChunkedLocal(128))
LATENT = Latent(kind=Mla(), state_bytes=1152)


def state(num_bytes: int, family: str = "gdn") -> Recurrent:
    return Recurrent(kind=State(), shapes=((num_bytes // 2,),), item_bytes=(2,), family=family)


def stack(*caches: Cache, part: str = "attn") -> list[Layer]:
    return [Layer(index=index, part=part, cache=cache) for index, cache in enumerate(caches)]


def groups(layers: list[Layer], **options: Any) -> list[tuple[Kind, int, list[int]]]:
    """Kind, block size and layer numbers of each group."""
    found = group_layers(layers, EngineOptions(**options))
    return [(g.kind, g.block_size, [layer.layer.index for layer in g.layers]) for g in found.groups]


def test_layers_that_are_alike_are_one_group() -> None:
    found = group_layers(stack(FULL, FULL, FULL), EngineOptions())
    layer = GroupLayer(layer=stack(FULL)[0], page_bytes=16 * 512, data_bytes=16 * 512)
    assert [g.layers[0] for g in found.groups] == [layer]
    assert (found.bytes_per_block, found.scheduler_block_size, found.notes) == (3 * 16 * 512, 16, ())


def test_groups_take_every_nth_layer_and_the_last_may_be_short() -> None:
    """Five sliding to one full, eleven and two: six sliding groups, of two layers but for one."""
    layers = stack(*([SLIDING] * 5 + [FULL]) * 2, SLIDING)
    sliding = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12]
    expected: list[tuple[Kind, int, list[int]]] = [(SlidingWindow(64), 16, sliding[first::6]) for first in range(6)]
    assert groups(layers) == [*expected, (Full(), 16, [5, 11])]
    notes = group_layers(layers, EngineOptions()).notes
    assert notes == ("group 5 is one layer short: its blocks leave 50% of their bytes unused",)


@pytest.mark.parametrize(
    ("sliding", "full", "sizes"),
    [(12, 13, [12, 13]), (2, 3, [2, 2, 1]), (3, 4, [3, 4]), (20, 30, [20, 15, 15]), (4, 4, [4, 4])],
)
def test_the_smallest_bucket_is_the_group_unless_the_largest_is_less_than_half_larger(
    sliding: int, full: int, sizes: list[int]
) -> None:
    assert [len(layers) for *_, layers in groups(stack(*[SLIDING] * sliding, *[FULL] * full))] == sizes


def test_a_smaller_page_gets_a_larger_block() -> None:
    wide = attention(Full(), heads=2, size=128)
    found = group_layers(stack(SLIDING, wide), EngineOptions())
    assert [g.block_size for g in found.groups] == [32, 16]
    assert found.scheduler_block_size == 32
    assert found.notes == (
        "block size 16 of sliding_window layers raised to 32: all pages become 16,384 bytes (one layer)",
    )


def test_a_page_that_does_not_divide_the_largest_is_padded() -> None:
    odd = attention(Full(), heads=2, size=96)
    found = group_layers(stack(SLIDING, odd), EngineOptions())
    assert [g.block_size for g in found.groups] == [16, 16]
    sliding = found.groups[0].layers[0]
    assert (sliding.page_bytes, sliding.data_bytes) == (16 * 768, 16 * 512)


def test_layers_of_one_kind_with_unequal_pages_share_a_table() -> None:
    """DeepSeek-V3.2's latents and indexer keys; Gemma 4's two widths without HMA."""
    layers = stack(LATENT, Latent(kind=Mla(), state_bytes=132))
    assert groups(layers) == [(Mla(), 16, [0, 1])]
    assert group_layers(layers, EngineOptions()).bytes_per_block == 16 * (1152 + 132)
    assert groups(stack(SLIDING, attention(Full(), size=128)), hma=False) == [(Full(), 16, [0, 1])]


def test_latents_that_fit_no_common_page_take_windowed_layers_into_their_table() -> None:
    """A windowed drafter beside latents: 1,152 and 1,024 bytes a token, and latents are never padded."""
    wide = attention(SlidingWindow(64), heads=2, size=192)
    assert groups(stack(LATENT, wide)) == [(Full(), 16, [0, 1])]
    with pytest.raises(ConfigError, match="pages of latents cannot be padded"):
        groups(stack(LATENT, attention(ChunkedLocal(64), heads=2, size=192)))


def test_without_hma_windows_and_chunks_are_allocated_as_full_attention() -> None:
    found = group_layers(stack(FULL, SLIDING, CHUNKED), EngineOptions(hma=False))
    assert [(g.kind, len(g.layers)) for g in found.groups] == [(Full(), 3)]
    assert found.groups[0].layers[1].layer.kind == SlidingWindow(64)
    assert found.notes == ("allocated as full attention without HMA: 2 layers",)


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ((FULL, state(1024)), "Layers of kind state cannot be allocated as full attention"),
        ((FULL, SLIDING, attention(SlidingWindow(128))), "windows of 64 and 128 tokens"),
        ((FULL, CHUNKED, attention(ChunkedLocal(64))), "chunks of 64 and 128 tokens"),
        ((SLIDING, CHUNKED), "no full attention"),
        ((LATENT, Latent(kind=Mla(128), state_bytes=584, block_size=64)), "latents with a window"),
    ],
)
def test_without_hma_vllm_refuses(caches: tuple[Cache, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        groups(stack(*caches), hma=False)
    assert refused.value.remedy == "Leave HMA on."


def test_one_page_must_hold_a_state() -> None:
    """Qwen3-Next: 2,048 bytes a token; 536 tokens hold a state of 1,097,728 bytes, 544 are the next multiple of 16."""
    full = attention(Full(), heads=2, size=256)
    found = group_layers(stack(full, state(1_097_728)), EngineOptions())
    assert [(g.kind, g.block_size) for g in found.groups] == [(Full(), 544), (State(), 544)]
    page = found.groups[1].layers[0]
    assert (page.page_bytes, page.data_bytes) == (1_114_112, 1_097_728)
    assert found.notes == (
        "block size 16 raised to 544: one page must hold a state of 1,097,728 bytes",
        "a state of 1,097,728 bytes is padded to a page of 1,114,112 bytes",
    )


@pytest.mark.parametrize(
    ("options", "block_size"),
    [({}, 544), ({"device": "cpu"}, 640), ({"block_size": 600 // 16 * 16}, 592), ({"block_size": 1024}, 1024)],
)
def test_the_aligned_block_is_a_multiple_of_what_was_asked_for(options: dict[str, Any], block_size: int) -> None:
    full = attention(Full(), heads=2, size=256)
    assert groups(stack(full, state(1_097_728)), **options)[0][1] == block_size


def test_latents_beside_states_lie_in_multiples_of_128() -> None:
    assert groups(stack(LATENT, state(2_170_880)))[0][1] == 1920
    assert groups(stack(LATENT, state(1024)))[0][1] == 128
    notes = group_layers(stack(LATENT, state(1024)), EngineOptions(device="cpu")).notes
    assert "on a CPU without AMX vLLM reads latents in blocks of 16 only: this plan needs AMX" in notes


def test_without_prefix_caching_a_state_spans_the_sequence() -> None:
    layers = stack(FULL, state(1024))
    assert [block for _, block, _ in groups(layers, prefix_caching=False, max_model_len=5000)] == [16, 5000]
    only_states = stack(state(1024), state(1024))
    assert groups(only_states, max_model_len=5000) == [(State(), 5000, [0, 1])]
    assert groups(only_states, prefix_caching=True, device="cpu") == [(State(), 16, [0, 1])]
    with pytest.raises(ConfigError, match="no maximum length is known"):
        groups(only_states)


@pytest.mark.parametrize(
    ("caches", "options", "block_size"),
    [
        ((FULL,), {}, 16),
        ((FULL,), {"device": "cpu"}, 128),
        ((FULL,), {"block_size": 64}, 64),
        ((LATENT,), {"device": "cpu"}, 16),
        ((LATENT,), {"device": "cpu", "block_size": 64}, 64),
    ],
)
def test_block_sizes_of_a_platform(caches: tuple[Cache, ...], options: dict[str, Any], block_size: int) -> None:
    assert groups(stack(*caches), **options)[0][1] == block_size


def test_sparse_latents_default_to_64() -> None:
    layers = [*stack(LATENT, part="mla"), *stack(Latent(kind=Mla(), state_bytes=132), part="indexer")]
    assert groups(layers) == [(Mla(), 64, [0, 0])]
    notes = group_layers(layers, EngineOptions(block_size=16)).notes
    assert notes == ("vLLM's sparse latent kernels do not start with 16: multiples of 64 do",)
    with pytest.raises(ConfigError, match="does not run sparse latent attention on CPU"):
        groups(layers, device="cpu")


@pytest.mark.parametrize(
    ("caches", "options", "words"),
    [
        ((FULL,), {"block_size": 24}, "FLASH_ATTN does not take blocks of 24 tokens. .* use --block-size 32"),
        ((FULL,), {"block_size": 16, "device": "cpu"}, "CPU_ATTN .* multiples of 32: use --block-size 32"),
        ((FULL, SLIDING), {"block_size": 24, "device": "cpu"}, "CPU_ATTN does not take blocks of 24"),
        ((FULL,), {"block_size": 0}, "at least one token"),
        ((FULL,), {"layout": "block_outermost", "device": "cpu"}, "layer-compact caches only"),
        ((), {}, "no groups"),
    ],
)
def test_what_no_kernel_takes_is_refused(caches: tuple[Cache, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        groups(stack(*caches), **options)
    assert re.search(words, str(refused.value))


def test_small_blocks_on_cpu_work_where_windows_pull_the_others_up() -> None:
    """Seen with Gemma 3 on CPU, --block-size 16: windowed layers take 32, the least that CPU_ATTN reads, and full
    attention follows to equal pages."""
    layers = stack(*([SLIDING] * 5 + [FULL]) * 2)
    assert {block for _, block, _ in groups(layers, device="cpu", block_size=16)} == {32}


# -- blocks outermost ------------------------------------------------------------------------------------------------

PACKED: dict[str, Any] = {"layout": "block_outermost"}


def test_packed_groups_keep_their_pages_and_windows_do_not_widen_the_block() -> None:
    """Full pages of 8,192 and sliding pages of 16,384 bytes: a block holds four full layers, so two sliding ones."""
    wide = attention(SlidingWindow(64), heads=2, size=128)
    found = group_layers(stack(*[FULL] * 4, *[wide] * 5), EngineOptions(**PACKED))
    assert [(g.kind.name, g.block_size, [x.layer.index for x in g.layers]) for g in found.groups] == [
        ("full", 16, [0, 1, 2, 3]),
        ("sliding_window", 16, [4, 7]),
        ("sliding_window", 16, [5, 8]),
        ("sliding_window", 16, [6]),
    ]
    assert found.bytes_per_block == 4 * 8192


def test_equal_pages_are_grouped_alike_in_every_layout() -> None:
    layers = stack(*([SLIDING] * 5 + [FULL]) * 2)
    assert groups(layers, **PACKED) == groups(layers)


def test_a_bucket_of_several_page_sizes_sets_how_many_repeats_a_group_takes() -> None:
    """Two repeats of (small, large) stay whole; five sliding layers in groups of two leave the fewest slots empty."""
    small, large = attention(Full(), size=64), attention(Full(), size=128)
    found = groups(stack(*[small, large] * 2, *[SLIDING] * 5), **PACKED)
    assert [indices for *_, indices in found] == [[0, 1, 2, 3], [4, 7], [5, 8], [6]]


def test_layers_that_vllm_would_lose_are_refused() -> None:
    narrow, wide = attention(SlidingWindow(64), size=64), attention(SlidingWindow(64), size=128)
    with pytest.raises(ConfigError, match="leaves some of them without a group"):
        groups(stack(FULL, *[narrow] * 3, wide), **PACKED)


def test_dictated_blocks_stay_and_lie_outermost() -> None:
    window = Latent(kind=Mla(128), state_bytes=584, block_size=64, page_multiple=576)
    compressed = Latent(kind=Mla(), state_bytes=584, tokens_per_state=4, block_size=256, page_multiple=576)
    found = group_layers(stack(window, compressed), EngineOptions(block_size=16))
    assert found.layout == "block_outermost"
    assert [(g.kind, g.block_size) for g in found.groups] == [(Mla(128), 64), (Mla(), 256)]
    pages = [(g.layers[0].page_bytes, g.layers[0].data_bytes) for g in found.groups]
    assert pages == [(37440, 64 * 584), (37440, 64 * 584)]
    assert found.notes == (
        "block size 16 is not used: every layer has one of its own, and vLLM starts DeepSeek-V4 with 256 only",
    )
    assert group_layers(stack(window, compressed), EngineOptions(block_size=256)).notes == ()
    with pytest.raises(ConfigError, match="refuses other layouts"):
        groups(stack(window, compressed), layout="layer_compact")
