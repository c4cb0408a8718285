"""A config.json gives layers or one sentence about what is wrong with it, whatever is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError, HmaError, ModelError
from hma_cli.models import catalog, classes
from hma_cli.models.architectures import layers_of
from hma_cli.models.config import parse
from hma_cli.models.options import RankOptions

SERVED = [name for name in catalog.names() if name != "microsoft/Phi-4-mini-flash-reasoning"]
CONFIGS = {name: json.loads(json.dumps(catalog.load(name).values)) for name in SERVED}
LLAMA = CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]

# Keys that no rule reads, so they may hold anything.
UNREAD = ("vocab_size", "max_position_embeddings", "intermediate_size_mlp", "rope_scaling", "bos_token_id")


def layers(values: object, **options: object) -> object:
    return layers_of(parse(values, name="m", source="test"), RankOptions(**options))  # type: ignore[arg-type]


def refusal(values: object, **options: object) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        layers(values, **options)
    return str(caught.value)


@pytest.mark.parametrize("values", [None, [], "x", 3, {}, {"architectures": []}, {"architectures": [7]}])
def test_what_is_no_config_at_all(values: object) -> None:
    with pytest.raises(ModelError):
        parse(values, name="m", source="test")


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size"])
def test_a_missing_field_is_named_with_its_purpose_and_what_would_work(field: str) -> None:
    message = refusal({key: value for key, value in LLAMA.items() if key != field})
    assert f"`{field}` is missing" in message
    assert "needed for" in message
    assert "whole number" in message


def test_a_nested_field_is_named_with_its_path() -> None:
    values = json.loads(json.dumps(CONFIGS["google/gemma-3-4b-it"]))
    del values["text_config"]["num_hidden_layers"]
    assert "`text_config.num_hidden_layers`" in refusal(values)


def test_a_multimodal_model_without_its_language_model() -> None:
    values = {key: value for key, value in CONFIGS["google/gemma-3-4b-it"].items() if key != "text_config"}
    assert "`text_config` is missing" in refusal(values)
    assert "`text_config`" in refusal({**values, "text_config": []})
    assert "`text_config`" in refusal({**values, "text_config": {}})


@pytest.mark.parametrize("value", ["32", 32.0, True, None, [], {}, 0, -1, 10_001, 1 << 70])
def test_a_number_of_layers_that_is_none(value: object) -> None:
    assert "`num_hidden_layers`" in refusal({**LLAMA, "num_hidden_layers": value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", -1),
        ("head_dim", 1 << 21),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 7),
        ("sliding_window", -5),
        ("sliding_window", "4096"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 32),
        ("layer_types", "full_attention"),
        ("torch_dtype", "int4"),
        ("model_type", "bert"),
    ],
)
def test_fields_with_senseless_values_are_named(field: str, value: object) -> None:
    assert f"`{field}`" in refusal({**LLAMA, field: value})


def test_long_values_are_not_repeated_in_full() -> None:
    assert len(refusal({**LLAMA, "head_dim": "x" * 10_000})) < 400


def test_origins_are_kept_in_order_of_use() -> None:
    config = parse(CONFIGS["google/gemma-3-4b-it"], name="m", source="test")
    assert dict(config.origins) == {"architectures": "config.json"}
    layers_of(config, RankOptions(dtype="float32", kv_dtype="fp8"))
    assert next(iter(config.origins)) == "architectures"
    assert config.origins["dtype"] == "--dtype"
    assert config.origins["KV cache dtype"] == "--kv-dtype"
    assert config.used["text_config.num_key_value_heads"].value == 4
    assert config.nested


def test_what_the_table_lacks_is_asked_of_transformers_before_giving_up() -> None:
    pytest.importorskip("transformers")
    entry = classes.CLASSES["qwen2"]
    value, origin = classes.installed_default(entry, "max_position_embeddings")
    assert value == 32768
    assert origin.startswith("class default of Qwen2Config in transformers")
    assert classes.installed_default(entry, "no_such_field") == (None, "")


# --- whatever is in the file -----------------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(min_value=-(1 << 80), max_value=1 << 80),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["full_attention", "sliding_attention", "auto", "M*-E", "float32", "S"]),
    st.lists(st.one_of(st.integers(-2, 200), st.sampled_from(["full_attention", "conv", ""]), st.none()), max_size=70),
    st.dictionaries(
        st.sampled_from(["0", "head_dim", "kda_layers", "num_heads", "attention_type"]), st.integers(-1, 9)
    ),
)


def paths(values: dict[str, object]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [(key,) for key in values]
    for key, value in values.items():
        if isinstance(value, dict):
            found += [(key, *rest) for rest in paths(value)]
    return found


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, object]:
    """A real config with some of its fields removed or replaced, and some fields of other families added."""
    values: dict[str, object] = json.loads(json.dumps(CONFIGS[draw(st.sampled_from(SERVED))]))
    extra = draw(
        st.dictionaries(
            st.sampled_from(
                [
                    "layer_types",
                    "sliding_window",
                    "head_dim",
                    "quantization_config",
                    "per_layer_config",
                    "text_config",
                    "layers_block_type",
                    "index_topk_pattern",
                    "mamba_n_groups",
                    "use_bidirectional_attention",
                ]
            ),
            JUNK,
            max_size=2,
        )
    )
    for path in draw(st.lists(st.sampled_from(paths(values)), min_size=1, max_size=3)):
        inner = values
        for key in path[:-1]:
            following = inner.get(key)
            if not isinstance(following, dict):
                break
            inner = following
        else:
            if draw(st.booleans()):
                inner.pop(path[-1], None)
            else:
                inner[path[-1]] = draw(JUNK)
    return {**values, **extra}


@settings(max_examples=1500, deadline=None)
@given(damaged(), st.sampled_from([1, 2, 3, 8, 64]), st.sampled_from(["auto", "fp8", "bfloat16"]))
def test_any_file_gives_layers_or_a_reasoned_refusal(values: dict[str, object], tp: int, kv_dtype: str) -> None:
    found: object
    refused: HmaError | None = None
    try:
        found = layers(values, tp=tp, kv_dtype=kv_dtype)
    except HmaError as error:
        found, refused = None, error
    assert found or (refused and refused.message and refused.remedy)


@pytest.mark.parametrize("key", UNREAD)
@pytest.mark.parametrize("model", ["google/gemma-3-4b-it", "tiiuae/Falcon-H1-7B-Instruct"])
def test_fields_that_do_not_matter_may_be_anything(model: str, key: str) -> None:
    assert layers({**CONFIGS[model], key: {"x": [None]}}) == layers(CONFIGS[model])


def test_catalog_files_are_as_the_reference_data() -> None:
    """The catalog carries the same values as the data it was made from."""
    folder = Path(__file__).parents[4] / "shared" / "data" / "model_configs"
    if not folder.is_dir():
        pytest.skip("the reference data are not beside this checkout")
    ours = {"_model", "_confidence", "_not_found", "_class_defaults"}
    found = {}
    for file in folder.glob("*.json"):
        values = json.loads(file.read_text())
        found[values["_model"]] = {key: value for key, value in values.items() if key not in ours}
    assert {name: dict(catalog.load(name).values) for name in catalog.names()} == found
