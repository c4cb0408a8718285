"""Attention in every layer, with one window for the whole model or none.

Sources: vLLM's llama.py, mistral.py, mixtral.py, qwen2.py, qwen2_moe.py, qwen3.py, qwen3_moe.py, gemma.py, granite.py,
granitemoe.py, commandr.py, mimo.py, and transformers/base.py for models that run on transformers' own code.
"""

from __future__ import annotations

from connector.plan.kinds import Full, SlidingWindow
from hma_cli.models.architectures.attention import (
    FULL,
    SLIDING,
    attention_layers,
    derived_heads,
    kind_of,
    model_window,
    stated_heads,
    stated_types,
    windowed_kinds,
)
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Layer
from hma_cli.models.fields import Fields

_TYPES = (FULL, SLIDING)


def windowed(rank: Rank) -> tuple[Layer, ...]:
    """Llama, Mistral, Phi-3, Granite: `layer_types` where the file has it, else the model-wide window everywhere."""
    return attention_layers(rank, _windowed_kinds(rank), stated_heads(rank))


def uniform(rank: Rank) -> tuple[Layer, ...]:
    """Mixtral, Gemma, Cohere: the model-wide window for all layers or none; nothing is decided layer by layer."""
    count = rank.num_layers()
    types = stated_types(rank.text, count, _TYPES)
    return attention_layers(rank, (kind_of(model_window(rank.text, types)),) * count, stated_heads(rank))


def granite_moe(rank: Rank) -> tuple[Layer, ...]:
    """As Llama, but the head size is always hidden_size / num_attention_heads."""
    return attention_layers(rank, _windowed_kinds(rank), derived_heads(rank))


def qwen2(rank: Rank) -> tuple[Layer, ...]:
    """As Qwen 3, but the head size is always hidden_size / num_attention_heads."""
    return attention_layers(rank, _qwen_kinds(rank), derived_heads(rank))


def qwen3(rank: Rank) -> tuple[Layer, ...]:
    """The window counts only where `use_sliding_window` is true; then layers from `max_window_layers` on slide."""
    return attention_layers(rank, _qwen_kinds(rank), stated_heads(rank))


def qwen2_moe(rank: Rank) -> tuple[Layer, ...]:
    """Every other layer slides in transformers' class; vLLM applies the window only where all layers do."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, _TYPES)
    if not _uses_window(text):
        return attention_layers(rank, (Full(),) * count, derived_heads(rank))
    if types is None:
        first = text.integer("max_window_layers", "the layers that slide", low=0)
        types = tuple(FULL if (index + 1) % 2 == 0 or index >= first else SLIDING for index in range(count))
    return attention_layers(rank, (kind_of(model_window(text, types)),) * count, derived_heads(rank))


def qwen3_moe(rank: Rank) -> tuple[Layer, ...]:
    """The window of the whole model, where `use_sliding_window` is true."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, _TYPES)
    window = model_window(text, types) if _uses_window(text) else None
    return attention_layers(rank, (kind_of(window),) * count, stated_heads(rank))


def _windowed_kinds(rank: Rank) -> tuple[Full | SlidingWindow, ...]:
    count = rank.num_layers()
    types = stated_types(rank.text, count, _TYPES)
    return windowed_kinds(rank.text, types) if types else (kind_of(model_window(rank.text, types)),) * count


def _qwen_kinds(rank: Rank) -> tuple[Full | SlidingWindow, ...]:
    """vLLM refuses models of this class in which some layers slide and others do not (qwen2.py)."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, _TYPES)
    uses = _uses_window(text)
    if types is None and not uses:
        return (Full(),) * count
    first = text.optional_integer("max_window_layers", "the first layer that slides", low=0)
    if types is None:
        if first is None:
            raise text.error("max_window_layers", "is missing", "the first layer that slides", "Add it.")
        types = tuple(SLIDING if index >= first else FULL for index in range(count))
    if len(set(types)) > 1 and first != count:
        raise text.error(
            "max_window_layers",
            f"is {first} of {count} layers",
            "which layers slide, and vLLM serves this class only where all layers do or none",
            "Set use_sliding_window to false to plan without the window.",
        )
    return (kind_of(model_window(text, types) if uses else None),) * count


def _uses_window(text: Fields) -> bool:
    return text.flag("use_sliding_window", "whether the window is in use")
