"""The groups that `hma inspect-plan` plans for a config.json are those that real engines build from the checkpoint.

Here Gemma 3, and engines without HMA; the other hybrids in test_kinds, whose engines are there anyway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connector.errors import ConfigError
from hma_cli.inspection.live import numbers
from hma_cli.models.architectures import layers_of
from hma_cli.models.grouping import EngineOptions, group_layers
from hma_cli.models.lookup import find
from hma_cli.models.options import RankOptions
from tests.engines import engine_args, engines, state_dtype
from tests.hybrid_models import HYBRIDS

MAX_MODEL_LEN = 1024
SPECS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "state",
}
# model, block size (None: vLLM's own), HMA, prefix caching
CASES: dict[str, tuple[str, int | None, bool, bool]] = {
    "gemma3": ("gemma3", None, True, True),
    "gemma3, blocks of 32": ("gemma3", 32, True, False),
    "llama4, blocks of 64, without HMA": ("llama4", 64, False, True),
    "gpt_oss, without HMA": ("gpt_oss", None, False, False),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The groups of a real engine for each case."""
    specs = {name: _arguments(*case) for name, case in CASES.items()}
    with engines(specs, tmp_path_factory.mktemp("groups")) as started:
        return {name: engine.call("groups") for name, engine in started.items()}


def _arguments(model: str, block_size: int | None, hma: bool, prefix_caching: bool) -> dict[str, Any]:
    return engine_args(
        HYBRIDS[model](),
        None,
        dtype="auto",
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        enable_prefix_caching=prefix_caching,
        disable_hybrid_kv_cache_manager=not hma,
    )


def planned(
    path: Path, block_size: int | None, *, hma: bool, prefix_caching: bool, dtype: str | None = None
) -> list[dict[str, Any]]:
    """The groups that the command line plans for a checkpoint."""
    options = EngineOptions(
        block_size=block_size,
        device="cpu",
        hma=hma,
        prefix_caching=prefix_caching,
        max_model_len=MAX_MODEL_LEN,
    )
    layers = layers_of(find(str(path)), RankOptions(dtype=dtype, ssm_dtype=state_dtype()))
    grouping = group_layers(layers, options)
    return [
        {
            "kind": group.kind.name,
            "window": group.kind.window,
            "chunk": group.kind.chunk,
            "block_size": group.block_size,
            "page_bytes": group.layers[0].page_bytes,
            "layers": [layer.layer.index for layer in group.layers],
        }
        for group in grouping.groups
    ]


def told(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An engine's own groups in the same words."""
    return [
        {
            "kind": SPECS[group["spec"]],
            # Promoted layers keep their window for computing; their blocks are kept like those of full attention.
            "window": group["window"] if group["spec"] == "SlidingWindowSpec" else None,
            "chunk": group["chunk"] if group["spec"] == "ChunkedLocalAttentionSpec" else None,
            "block_size": group["block_size"],
            "page_bytes": group["page_bytes"],
            "layers": numbers(group["layers"]),
        }
        for group in groups
    ]


@pytest.mark.parametrize("case", CASES)
def test_planned_groups_are_those_of_a_real_engine(built: dict[str, list[dict[str, Any]]], case: str) -> None:
    model, block_size, hma, prefix_caching = CASES[case]
    real = told(built[case])
    assert planned(HYBRIDS[model](), block_size, hma=hma, prefix_caching=prefix_caching) == real


@pytest.mark.parametrize("model", ["qwen3_next", "falcon_h1", "nemotron_h"])
def test_models_with_states_are_refused_without_hma(model: str) -> None:
    with pytest.raises(ConfigError, match="does not start this model without HMA"):
        planned(HYBRIDS[model](), None, hma=False, prefix_caching=True)
