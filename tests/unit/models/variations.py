"""Configs of published models and variations of them, and what their layers keep."""

from __future__ import annotations

import json

from hma_cli.models import catalog
from hma_cli.models.architectures import layers_of
from hma_cli.models.caches import Attention, Latent, Layer
from hma_cli.models.config import ModelConfig, parse
from hma_cli.models.lookup import find
from hma_cli.models.options import RankOptions

REFUSED = "microsoft/Phi-4-mini-flash-reasoning"
"""The one model of the catalog that vLLM 0.32 does not have."""

SERVED = [name for name in catalog.names() if name != REFUSED]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


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
