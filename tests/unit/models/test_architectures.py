"""What the layers of published models keep, against vLLM 0.32's own grouping; every trap of their config files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from connector.errors import ConfigError, ModelError
from connector.plan.kinds import ChunkedLocal, Full, Mla, SlidingWindow, State
from hma_cli.models import catalog
from hma_cli.models.architectures import RULES, layers_of
from hma_cli.models.caches import Attention, Latent, Layer, Recurrent
from hma_cli.models.classes import CLASSES, ConfigClass
from hma_cli.models.config import ModelConfig, parse
from hma_cli.models.lookup import find
from hma_cli.models.options import RankOptions

EXPECTED = Path(__file__).parents[4] / "shared" / "data" / "expected_groups.json"
REFUSED = "microsoft/Phi-4-mini-flash-reasoning"
KINDS = {
    "full_attention": "full",
    "sliding_window": "sliding_window",
    "chunked_local_attention": "chunked_local",
    "mamba": "state",
    "mla_attention": "mla",
    "sliding_window_mla": "sliding mla",
}
# The figures were made with the file's float32, which vLLM serves in 16 bits unless --dtype says otherwise.
FIGURES_DTYPE = {"state-spaces/mamba-2.8b-hf": "float32"}


def config_of(text: dict[str, object], **root: object) -> ModelConfig:
    """A config whose language model has these fields, nested where `root` has any."""
    values = {**text} if not root else {**root, "text_config": text}
    return parse(values, name="m", source="test")


def layers(model: str | ModelConfig, **options: object) -> tuple[Layer, ...]:
    config = find(model, offline=True) if isinstance(model, str) else model
    return layers_of(config, RankOptions(**options))  # type: ignore[arg-type]


def changed(model: str, **changes: object) -> ModelConfig:
    """A catalog model with other fields in its language model's part; None removes the field."""
    found = find(model, offline=True)
    values = json.loads(json.dumps(found.values))
    text = values.get("text_config", values)
    for key, value in changes.items():
        if value is None:
            text.pop(key, None)
        else:
            text[key] = value
    return parse(values, name=model, source="test")


def only(found: tuple[Layer, ...], kind: type) -> list[Layer]:
    return [layer for layer in found if isinstance(layer.kind, kind)]


def page_bytes(cache: Attention | Latent, block_size: int) -> int:
    if isinstance(cache, Attention):
        return cache.token_bytes * block_size
    vectors = (cache.block_size or block_size) // cache.tokens_per_state
    return -(-vectors * cache.state_bytes // cache.page_multiple) * cache.page_multiple


def named_kind(layer: Layer) -> str:
    return "sliding mla" if layer.kind.name == "mla" and layer.kind.window else layer.kind.name


@pytest.mark.skipif(not EXPECTED.is_file(), reason="the reference figures are not beside this checkout")
@pytest.mark.parametrize("model", [name for name in catalog.names() if name != REFUSED])
def test_layers_and_pages_are_those_of_vllms_own_groups(model: str) -> None:
    expected = json.loads(EXPECTED.read_text())[model]["block16"]
    found = layers(model, dtype=FIGURES_DTYPE.get(model))
    counts: Counter[str] = Counter()
    for kind, size, _block, number in expected["groups"]:
        counts[KINDS[kind]] += size * number
    assert Counter(named_kind(layer) for layer in found) == counts
    states = {layer.cache.num_bytes for layer in found if isinstance(layer.cache, Recurrent)}
    assert states == ({expected["mamba_page"]} if "mamba_page" in expected else set())
    if not states:
        # Pages of unequal size are unified by the grouping: the largest stays as it is.
        pages = {page_bytes(layer.cache, 16) for layer in found if not isinstance(layer.cache, Recurrent)}
        assert max(pages) == max(expected["page_size_bytes"])
        assert set(expected["page_size_bytes"]) <= pages


@pytest.mark.parametrize("model", catalog.names())
def test_every_value_of_a_catalog_model_has_an_origin(model: str) -> None:
    config = catalog.load(model)
    if model == REFUSED:
        with pytest.raises(ModelError, match=r"Phi4FlashForCausalLM.*0\.10\.2"):
            layers_of(config, RankOptions())
        return
    layers_of(config, RankOptions())
    assert len(config.origins) > 4
    assert all(config.origins.values())


# --- traps of config.json -------------------------------------------------------------------------------------------


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
        "layers.0.state",
        "layers.1.attn",
        "layers.1.state",
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


# --- windows ---------------------------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MIXED = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, [Full()] * 4),
        ({"sliding_window": 0}, [Full()] * 4),
        ({"sliding_window": None}, [Full()] * 4),
        ({"sliding_window": 64}, [SlidingWindow(64)] * 4),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, [SlidingWindow(64)] * 4),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 4}, [Full()] * 4),
        ({"sliding_window": 64, "layer_types": MIXED}, [SlidingWindow(64), Full()] * 2),
        ({"sliding_window": None, "layer_types": MIXED}, [Full()] * 4),
    ],
)
def test_the_window_of_the_whole_model_and_of_single_layers(fields: dict[str, object], kinds: list[object]) -> None:
    assert [layer.kind for layer in layers(config_of({**LLAMA, **fields}))] == kinds


def test_mistral_without_a_window_in_the_file_slides() -> None:
    config = changed("mistralai/Mistral-7B-v0.1", sliding_window=None)
    assert layers(config)[0].kind == SlidingWindow(4096)
    assert config.origins["sliding_window"] == "class default of MistralConfig"


def test_qwen_2_with_some_sliding_layers_is_refused_as_vllm_does() -> None:
    config = changed("Qwen/Qwen2.5-3B", use_sliding_window=True, max_window_layers=20)
    with pytest.raises(ModelError, match="max_window_layers"):
        layers(config)
    assert {
        layer.kind for layer in layers(changed("Qwen/Qwen2.5-3B", use_sliding_window=True, max_window_layers=0))
    } == {SlidingWindow(32768)}


# --- data types ------------------------------------------------------------------------------------------------------


def test_a_float32_checkpoint_is_served_in_16_bits_unless_told() -> None:
    config = find("state-spaces/mamba-2.8b-hf", offline=True)
    assert layers(config)[0].cache.num_bytes * 2 == layers(config, dtype="float32")[0].cache.num_bytes == 389_120  # type: ignore[union-attr]
    layers(config)
    assert "float32" in config.origins["torch_dtype"]


@pytest.mark.parametrize(
    ("quantization", "item_bytes"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, 2),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1),
        ({"quant_method": "fp8"}, 2),
    ],
)
def test_a_quantized_checkpoint_may_ask_for_an_fp8_cache(quantization: dict[str, object], item_bytes: int) -> None:
    config = config_of({**LLAMA, "quantization_config": quantization})
    assert layers(config)[0].cache.item_bytes == item_bytes  # type: ignore[union-attr]
    assert layers(config, kv_dtype="bfloat16")[0].cache.item_bytes == 2  # type: ignore[union-attr]


def test_states_keep_the_models_dtype_under_an_fp8_cache() -> None:
    found = layers("ibm-granite/granite-4.0-h-tiny", kv_dtype="fp8")
    assert only(found, Full)[0].cache.item_bytes == 1  # type: ignore[union-attr]
    assert only(found, State)[0].cache.item_bytes == (2, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("google/gemma-2-2b-it", {"dtype": "float16"}, "float16"),
        ("deepseek-ai/DeepSeek-V4-Pro", {"kv_dtype": "bfloat16"}, "fp8"),
        ("deepseek-ai/DeepSeek-V3.2", {"kv_dtype": "fp8_ds_mla"}, "fp8_ds_mla"),
    ],
)
def test_data_types_that_a_model_cannot_have(model: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers(model, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RankOptions(tp=0),
        lambda: RankOptions(tp=True),
        lambda: RankOptions(dtype="int8"),
        lambda: RankOptions(kv_dtype="nvfp4"),
        lambda: RankOptions(ssm_dtype="fp8"),
    ],
)
def test_options_that_do_not_exist(make: Callable[[], RankOptions]) -> None:
    with pytest.raises(ConfigError):
        make()


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_divided_and_then_shared(tp: int, heads: int) -> None:
    found = layers("meta-llama/Llama-3.1-8B-Instruct", tp=tp)
    assert {(layer.cache.heads, layer.cache.total_heads) for layer in found} == {(heads, 8)}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "tp", "working"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 3, "1, 2, 4, 8, 16, 32"),
        ("tiiuae/Falcon-H1-1.5B-Instruct", 3, "1, 2, 4, 8"),
        ("openai/gpt-oss-20b", 16, "1, 2, 4, 8"),
        ("nvidia/Nemotron-H-8B-Base-8K", 16, "1, 2, 4, 8"),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 5, "1, 2, 4, 8, 16, 32"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 2, "1, 3, 9"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused_with_those_that_do(model: str, tp: int, working: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layers(model, tp=tp)
    assert caught.value.remedy == f"Tensor parallel sizes that work: {working}."


def test_a_single_state_group_is_copied_to_every_rank() -> None:
    state = only(layers("tiiuae/Falcon-H1-7B-Instruct", tp=4), State)[0].cache
    assert isinstance(state, Recurrent)
    assert state.shapes == ((3, (3072 + 2 * 4 * 256) // 4), (6, 128, 256))


def test_state_shapes_are_vllms_for_every_number_of_ranks() -> None:
    calculator = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
    for tp in (1, 2, 4, 8):
        expected = {
            "nvidia/Nemotron-H-8B-Base-8K": calculator.mamba2_state_shape(tp, 8192, 8, 128, 64, 128, 4),
            "tiiuae/Falcon-H1-7B-Instruct": calculator.mamba2_state_shape(tp, 3072, 1, 24, 128, 256, 4),
            "Qwen/Qwen3.5-9B": calculator.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4),
            "moonshotai/Kimi-Linear-48B-A3B-Instruct": calculator.kda_state_shape(tp, 32, 128),
            "ai21labs/Jamba-v0.1": calculator.mamba1_state_shape(tp, 8192, 16, 4),
            "LiquidAI/LFM2-1.2B": calculator.short_conv_state_shape(tp, 2048, 3),
        }
        for model, shapes in expected.items():
            if model.startswith("tiiuae") and tp == 8:
                assert layers(model, tp=4) is not None  # 12 query heads do not divide by 8
                continue
            # The convolution's two axes lie the other way round on CPU; the number of elements is the same.
            found = [tuple(sorted(shape)) for shape in only(layers(model, tp=tp), State)[0].cache.shapes]  # type: ignore[union-attr]
            assert found == [tuple(sorted(shape)) for shape in shapes], (model, tp)


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("FooForCausalLM", "no rule for FooForCausalLM"),
        ("BambaForCausalLM", r"0\.23\.0"),
        ("Qwen3NextForCausalLn", "Did you mean Qwen3NextForCausalLM"),
    ],
)
def test_architectures_without_a_rule_are_refused_by_name(architecture: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        layers(config_of({**LLAMA, "architectures": [architecture]}))


def test_a_rule_is_not_applied_to_another_class_of_config() -> None:
    with pytest.raises(ModelError, match="model_type"):
        layers(config_of({**LLAMA, "model_type": "qwen3"}))


def test_differences_between_layers_are_not_ignored() -> None:
    with pytest.raises(ModelError, match="per_layer_config"):
        layers(config_of({**LLAMA, "per_layer_config": {"1": {"head_dim": 64}}}))


def test_vllm_knows_every_architecture_that_has_a_rule() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    # Runs on transformers' own code, for which vLLM needs no entry.
    assert set(RULES) - set(registry._VLLM_MODELS) == {"MinistralForCausalLM"}


def test_the_removed_architectures_are_vllms() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    from hma_cli.models.architectures.removed import LAST_VERSION

    assert LAST_VERSION == registry._PREVIOUSLY_SUPPORTED_MODELS


# --- class defaults, against the installed transformers --------------------------------------------------------------

IN_TRANSFORMERS = [entry for entry in CLASSES.values() if entry.in_transformers]


@pytest.mark.parametrize("entry", IN_TRANSFORMERS, ids=lambda entry: entry.model_type)
def test_class_defaults_are_those_of_transformers(entry: ConfigClass) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    from dataclasses import MISSING, fields

    # vLLM reads these with DeepSeek V3's class.
    model_type = {"deepseek_v32": "deepseek_v3", "kimi_k2": "deepseek_v3"}.get(entry.model_type, entry.model_type)
    cls = auto.CONFIG_MAPPING[model_type]
    assert cls.__name__ == entry.name
    defaults = {item.name: item.default for item in fields(cls) if item.default is not MISSING}
    found = {key: defaults.get(key) for key in entry.defaults}
    assert found == dict(entry.defaults)


@pytest.mark.parametrize("architecture", [name for name in RULES if name.endswith("ForCausalLM")])
def test_a_file_that_says_nothing_means_what_transformers_fills_in(architecture: str) -> None:
    """Layers from the fewest fields equal those from everything that transformers' class writes out for them."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    model_type = RULES[architecture].model_types[0]
    if not CLASSES[model_type].in_transformers or model_type in ("deepseek_v32", "mimo_v2_flash", "lfm2_moe"):
        pytest.skip("its class is not in transformers, or leaves out what only files state")
    least: dict[str, object] = {"num_hidden_layers": 24, "hidden_size": 5120, "dtype": "bfloat16"}
    if model_type == "nemotron_h":
        least = {"hidden_size": 4096, "hybrid_override_pattern": "M-M*E", "dtype": "bfloat16"}
    elif model_type in ("mamba2", "falcon_h1", "granitemoehybrid"):
        least["hidden_size"] = 4096
    if model_type == "lfm2":
        least["conv_dim"] = 5120
    if model_type in ("cohere", "cohere2"):
        least["hidden_size"] = 8192
    filled = json.loads(auto.CONFIG_MAPPING[model_type](**least).to_json_string(use_diff=False))
    named = {"architectures": [architecture], "model_type": model_type}
    assert layers(config_of({**least, **named})) == layers(config_of({**filled, **named}))


@pytest.mark.parametrize("model", catalog.names())
def test_class_defaults_that_the_catalog_documents_are_in_use(model: str) -> None:
    if model == REFUSED:
        pytest.skip("vLLM 0.32 does not have it")
    entry = json.loads((Path(catalog.__file__).parent / f"{model.replace('/', '--')}.json").read_text())
    config = catalog.load(model)
    layers_of(config, RankOptions())
    for path, value in entry.get("class_defaults", {}).items():
        if path in config.used and not isinstance(value, str):
            assert config.used[path].value == value, path
