"""What the layers of published models keep, against vLLM 0.32's own grouping; windows, data types, ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from connector.errors import ConfigError, ModelError
from connector.plan.kinds import Full, SlidingWindow, State
from hma_cli.models import catalog
from hma_cli.models.architectures import RULES, layers_of
from hma_cli.models.caches import Layer, Recurrent
from hma_cli.models.lookup import find
from hma_cli.models.options import RankOptions
from tests.unit.models.variations import LLAMA, REFUSED, SERVED, changed, config_of, layers, only, page_bytes

EXPECTED = Path(__file__).parents[4] / "shared" / "data" / "expected_groups.json"
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


def named_kind(layer: Layer) -> str:
    return "sliding mla" if layer.kind.name == "mla" and layer.kind.window else layer.kind.name


@pytest.mark.skipif(not EXPECTED.is_file(), reason="the reference figures are not beside this checkout")
@pytest.mark.parametrize("model", SERVED)
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


# --- windows ---------------------------------------------------------------------------------------------------------

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
