"""Class defaults are those of the installed transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hma_cli.models import catalog
from hma_cli.models.architectures import RULES, layers_of
from hma_cli.models.classes import CLASSES, ConfigClass
from hma_cli.models.options import RankOptions
from tests.unit.models.variations import SERVED, config_of, layers

IN_TRANSFORMERS = [entry for entry in CLASSES.values() if entry.in_transformers]
# Classes that leave out what only files state.
UNFILLED = ("deepseek_v32", "mimo_v2_flash", "lfm2_moe")
# Architectures whose whole config transformers' own class writes out.
FILLED_IN = [
    name
    for name, rule in RULES.items()
    if name.endswith("ForCausalLM")
    and CLASSES[rule.model_types[0]].in_transformers
    and rule.model_types[0] not in UNFILLED
]


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


@pytest.mark.parametrize("architecture", FILLED_IN)
def test_a_file_that_says_nothing_means_what_transformers_fills_in(architecture: str) -> None:
    """Layers from the fewest fields equal those from everything that transformers' class writes out for them."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    model_type = RULES[architecture].model_types[0]
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


@pytest.mark.parametrize("model", SERVED)
def test_class_defaults_that_the_catalog_documents_are_in_use(model: str) -> None:
    entry = json.loads((Path(catalog.__file__).parent / f"{model.replace('/', '--')}.json").read_text())
    config = catalog.load(model)
    layers_of(config, RankOptions())
    for path, value in entry.get("class_defaults", {}).items():
        if path in config.used and not isinstance(value, str):
            assert config.used[path].value == value, path
