"""The traps of published config files, one test each: what a reader who trusts the field names gets wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from connector.plan.kinds import ChunkedLocal, Full, Mla, SlidingWindow, State
from hma_cli.models.caches import Attention, Latent, Recurrent
from hma_cli.models.lookup import find
from tests.unit.models.variations import changed, config_of, layers, only, page_bytes


def test_trap_1_gemma_3_4b_says_neither_heads_nor_head_size_nor_pattern() -> None:
    config = find("google/gemma-3-4b-it", offline=True)
    found = layers(config)
    assert [layer.index for layer in only(found, Full)] == [5, 11, 17, 23, 29]
    assert len(only(found, SlidingWindow)) == 29
    assert found[0].cache == Attention(
        kind=SlidingWindow(1024), heads=4, total_heads=4, head_size=256, head_size_v=256, item_bytes=2
    )
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window_pattern"):
        assert config.origins[f"text_config.{key}"] == "class default of Gemma3TextConfig"
    assert config.origins["text_config.num_hidden_layers"] == "config.json"


def test_trap_1_gemma_3_27b_states_its_heads_itself() -> None:
    config = find("google/gemma-3-27b-it", offline=True)
    assert layers(config)[0].cache.head_size == 128  # type: ignore[union-attr]
    assert config.origins["text_config.head_dim"] == "config.json"


@pytest.mark.parametrize(
    ("model", "full"),
    [
        ("google/gemma-2-2b-it", list(range(1, 26, 2))),
        ("CohereLabs/c4ai-command-r7b-12-2024", list(range(3, 32, 4))),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", list(range(3, 48, 4))),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", list(range(3, 48, 4))),
        ("ai21labs/Jamba-v0.1", [4, 12, 20, 28]),
        ("LiquidAI/LFM2-1.2B", [2, 5, 8, 10, 12, 14]),
        ("nvidia/Nemotron-H-8B-Base-8K", [7, 18, 29, 40]),
    ],
)
def test_trap_2_layer_types_are_absent_but_implied(model: str, full: list[int]) -> None:
    assert "layer_types" not in find(model, offline=True).values
    assert [layer.index for layer in only(layers(model), Full)] == full


def test_trap_2_kimi_counts_layers_from_one() -> None:
    found = layers("moonshotai/Kimi-Linear-48B-A3B-Instruct")
    assert [layer.index for layer in only(found, Mla)] == [3, 7, 11, 15, 19, 23, 26]


@pytest.mark.parametrize("stated", [[], None])
def test_trap_2_llama_4_takes_an_empty_list_for_no_list(stated: list[int] | None) -> None:
    config = changed("meta-llama/Llama-4-Scout-17B-16E-Instruct", no_rope_layers=stated)
    found = layers(config)
    assert [layer.index for layer in only(found, Full)] == list(range(3, 48, 4))
    assert only(found, ChunkedLocal)[0].kind == ChunkedLocal(8192)


def test_trap_3_a_window_that_is_not_in_use() -> None:
    assert find("Qwen/Qwen2.5-3B", offline=True).values["sliding_window"] == 32768
    assert {layer.kind for layer in layers("Qwen/Qwen2.5-3B")} == {Full()}


@pytest.mark.parametrize(
    ("model", "window"), [("mistralai/Mistral-7B-v0.1", 4096), ("microsoft/Phi-3-mini-4k-instruct", 2047)]
)
def test_trap_3_a_window_that_every_layer_uses(model: str, window: int) -> None:
    assert {layer.kind for layer in layers(model)} == {SlidingWindow(window)}


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "ai21labs/AI21-Jamba-1.5-Mini"])
def test_trap_3_a_window_of_null(model: str) -> None:
    assert not only(layers(model), SlidingWindow)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("mistralai/Mistral-7B-v0.1", 128),
        ("microsoft/Phi-3-mini-4k-instruct", 96),
        ("ibm-granite/granite-4.0-h-tiny", 128),
        ("LiquidAI/LFM2-1.2B", 64),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 64),
    ],
)
def test_trap_4_head_dim_is_absent(model: str, size: int) -> None:
    config = find(model, offline=True)
    attention = next(layer.cache for layer in layers(config) if isinstance(layer.cache, Attention))
    assert attention.head_size == size
    assert config.origins["head_dim"] == "hidden_size / num_attention_heads"


def test_trap_4_nemotron_h_spells_head_dim_otherwise_and_nobody_reads_it() -> None:
    config = changed("nvidia/Nemotron-H-8B-Base-8K", attention_head_dim=999)
    assert only(layers(config), Full)[0].cache.head_size == 128  # type: ignore[union-attr]
    assert config.origins["head_dim"] == "class default of NemotronHConfig"


def test_trap_5_gemma_4_has_two_head_sizes_and_two_numbers_of_kv_heads() -> None:
    found = layers("google/gemma-4-26B-A4B-it")
    full, sliding = only(found, Full)[0].cache, only(found, SlidingWindow)[0].cache
    assert isinstance(full, Attention)
    assert isinstance(sliding, Attention)
    assert (full.heads, full.head_size, full.head_size_v) == (2, 512, 512)
    assert (sliding.heads, sliding.head_size, sliding.head_size_v) == (8, 256, 256)
    assert layers("google/gemma-4-E4B-it")[5].cache.heads == 2  # type: ignore[union-attr]


def test_trap_5_gemma_4_as_transformers_writes_it_back() -> None:
    """Once saved by transformers 5, the file has `per_layer_config` instead of `global_head_dim`, by padded numbers."""
    stated = {f"{index:02}": {"head_dim": 512, "num_key_value_heads": 2} for index in range(5, 30, 6)}
    rewritten = changed(
        "google/gemma-4-26B-A4B-it", per_layer_config=stated, global_head_dim=None, num_global_key_value_heads=None
    )
    assert layers(rewritten) == layers("google/gemma-4-26B-A4B-it")


def test_trap_6_shared_layers_keep_no_cache() -> None:
    assert [layer.index for layer in layers("google/gemma-3n-E4B-it")] == list(range(20))
    assert [layer.index for layer in layers("google/gemma-4-E4B-it")] == list(range(24))


def test_trap_6_mlp_and_expert_layers_keep_no_cache() -> None:
    found = layers("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert len(found) == 29
    assert [layer.part for layer in found[:4]] == ["state", "state", "state", "attn"]
    assert [layer.index for layer in found[:4]] == [0, 2, 4, 5]


def test_trap_6_falcon_h1_has_two_caches_in_every_layer_attention_first() -> None:
    found = layers("tiiuae/Falcon-H1-7B-Instruct")
    assert [layer.name for layer in found[:4]] == [
        "layers.0.attn",
        "layers.44.state",  # as vLLM numbers it
        "layers.1.attn",
        "layers.45.state",
    ]
    assert len(found) == 88


STEP = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 12,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
}


def test_trap_7_step_counts_kv_heads_in_groups_and_its_layer_types_go_on_after_the_last_layer() -> None:
    found = layers(config_of(STEP))
    assert len(STEP["layer_types"]) == 48  # type: ignore[arg-type]
    assert (len(found), len(only(found, Full)), len(only(found, SlidingWindow))) == (45, 12, 33)
    assert {layer.cache.heads for layer in found} == {8}  # type: ignore[union-attr]
    assert only(found, SlidingWindow)[0].kind == SlidingWindow(512)


def test_trap_7_deepseek_v4_has_one_ratio_more_than_layers() -> None:
    config = find("deepseek-ai/DeepSeek-V4-Flash", offline=True)
    assert len(config.values["compress_ratios"]) == 44  # type: ignore[arg-type]
    assert max(layer.index for layer in layers(config)) == 42


MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "hybrid_layer_pattern": [0 if index == 0 or (index + 1) % 6 == 0 else 1 for index in range(48)],
}


def test_trap_8_mimo_ignores_the_chunk_size_and_has_narrow_values() -> None:
    found = layers(config_of(MIMO))
    assert not only(found, ChunkedLocal)
    full, sliding = only(found, Full), only(found, SlidingWindow)
    assert (len(full), len(sliding)) == (9, 39)
    assert full[0].cache.token_bytes == 4 * (192 + 128) * 2  # type: ignore[union-attr]
    assert sliding[0].cache.token_bytes == 8 * (192 + 128) * 2  # type: ignore[union-attr]


def test_trap_9_latents_are_576_wide_whatever_the_kv_heads() -> None:
    found = layers("deepseek-ai/DeepSeek-V3")
    assert {layer.cache for layer in found} == {Latent(kind=Mla(), state_bytes=1152)}
    assert layers("deepseek-ai/DeepSeek-V3", tp=8) == found


def test_trap_9_deepseek_v32_has_an_indexer_in_every_layer() -> None:
    found = layers("deepseek-ai/DeepSeek-V3.2")
    assert [layer.name for layer in found[:2]] == ["layers.0.indexer", "layers.0.mla"]
    assert Counter(layer.cache.state_bytes for layer in found) == {132: 61, 1152: 61}  # type: ignore[union-attr]


def test_trap_9_sparse_latents_in_fp8_have_a_format_of_their_own() -> None:
    found = layers("deepseek-ai/DeepSeek-V3.2", kv_dtype="fp8")
    assert {layer.cache.state_bytes for layer in found} == {132, 656}  # type: ignore[union-attr]
    dense = layers("deepseek-ai/DeepSeek-V3", kv_dtype="fp8")
    assert {layer.cache.state_bytes for layer in dense} == {576}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("nvidia/Nemotron-H-8B-Base-8K", (2, 4)),
        ("Qwen/Qwen3.5-9B", (2, 4)),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", (2, 4)),
        ("Qwen/Qwen3.5-4B", (2, 2)),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", (2, 2)),
        ("ibm-granite/granite-4.0-h-tiny", (2, 2)),
        ("LiquidAI/LFM2-1.2B", (2,)),
    ],
)
def test_trap_10_state_dtypes(model: str, sizes: tuple[int, ...]) -> None:
    assert only(layers(model), State)[0].cache.item_bytes == sizes  # type: ignore[union-attr]


def test_trap_10_the_state_dtype_can_be_told() -> None:
    found = only(layers("Qwen/Qwen3.5-4B", ssm_dtype="float32"), State)[0].cache
    assert isinstance(found, Recurrent)
    assert (found.item_bytes, found.num_bytes) == ((2, 4), 2_146_304)


def test_trap_11_cohere_2_sees_one_token_more() -> None:
    assert only(layers("CohereLabs/c4ai-command-r7b-12-2024"), SlidingWindow)[0].kind == SlidingWindow(4097)


def test_trap_11_gpt_oss_does_not_read_layer_types() -> None:
    upside_down = ["full_attention", "sliding_attention"] * 12
    found = layers(changed("openai/gpt-oss-20b", layer_types=upside_down))
    assert found == layers("openai/gpt-oss-20b")
    assert found[0].kind == SlidingWindow(128)


def test_deepseek_v4_layers_bring_their_block_sizes_and_pages() -> None:
    found = layers("deepseek-ai/DeepSeek-V4-Flash")
    compressed = [layer for layer in found if layer.index == 2]
    assert [(layer.part, layer.cache.block_size, page_bytes(layer.cache, 0)) for layer in compressed] == [  # type: ignore[union-attr,arg-type]
        ("indexer", 256, 8640),
        ("indexer_compressor", 4, 8640),
        ("window", 64, 37440),
        ("mla", 256, 37440),
        ("compressor", 4, 32832),
    ]
    assert [layer.part for layer in found if layer.index == 0] == ["window"]
    assert [page_bytes(layer.cache, 0) for layer in found if layer.index == 3] == [37440, 1728, 32832]  # type: ignore[arg-type]
