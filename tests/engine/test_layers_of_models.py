"""What our rules say that layers keep is what vLLM's own model classes ask for, layer by layer, in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hma_cli.models import catalog
from hma_cli.models.architectures import layers_of
from hma_cli.models.caches import Recurrent
from hma_cli.models.config import parse
from hma_cli.models.options import RankOptions
from tests.engines import state_dtype

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

# Text models whose catalog entry has all that vLLM needs to build one, one for each rule that can be built on CPU.
MODELS = (
    "google/gemma-3-1b-it",
    "google/gemma-2-2b-it",
    "CohereLabs/c4ai-command-r7b-12-2024",
    "openai/gpt-oss-20b",
    "allenai/Olmo-3-1025-7B",
    "mistralai/Ministral-8B-Instruct-2410",
    "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-3B",
    "ai21labs/Jamba-v0.1",
    "LiquidAI/LFM2-1.2B",
    "nvidia/Nemotron-H-8B-Base-8K",
    "ibm-granite/granite-4.0-h-tiny",
    "tiiuae/Falcon-H1-1.5B-Instruct",
    "tiiuae/falcon-mamba-7b",
    "state-spaces/mamba-2.8b-hf",
)


def test_layers_are_those_that_vllm_builds() -> None:
    configs: dict[str, dict[str, Any]] = {name: dict(catalog.load(name).values) for name in MODELS}
    # The language model alone: the multimodal class needs an image library.
    nested = catalog.load("google/gemma-4-E4B-it").values["text_config"]
    assert isinstance(nested, dict)
    configs["gemma 4"] = {**nested, "architectures": ["Gemma4ForCausalLM"]}
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers_child"],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout.splitlines()[-1])
    assert {name: ours(name, config) for name, config in configs.items()} == built


def ours(name: str, config: dict[str, Any]) -> list[list[object]]:
    layers = layers_of(parse(config, name=name, source="test"), RankOptions(ssm_dtype=state_dtype()))
    return [
        [
            layer.kind.name,
            layer.kind.window or layer.kind.chunk,
            layer.cache.num_bytes if isinstance(layer.cache, Recurrent) else layer.cache.token_bytes,
        ]
        for layer in layers
    ]
