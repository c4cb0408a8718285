"""Gemma 3n and Gemma 4: the last layers reuse the cache of an earlier one, and so keep none of their own.

Sources: vLLM's gemma3n.py and gemma4.py; transformers' Gemma4TextConfig for what differs between layers.
"""

from __future__ import annotations

from dataclasses import replace

from hma_cli.models.architectures.attention import (
    FULL,
    SLIDING,
    Heads,
    attention,
    every_nth_full,
    stated_heads,
    stated_types,
    windowed_kinds,
)
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Layer
from hma_cli.models.fields import MAX_LAYERS, Fields

_TYPES = (FULL, SLIDING)
_DIFFERENCES = "heads that differ between layers"


def gemma3n(rank: Rank) -> tuple[Layer, ...]:
    """Every fifth layer is full. The last `num_kv_shared_layers` reuse the last own layer or the one before it."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, _TYPES) or every_nth_full(
        text, count, 5, "every 5th layer is full in Gemma3nTextConfig"
    )
    own = _own_layers(rank, count)
    kinds, heads = windowed_kinds(text, types), stated_heads(rank)
    return tuple(
        Layer(index=index, part="attn", cache=attention(rank, kinds[index], heads))
        for index in range(count)
        # A layer whose target would lie before the first layer keeps a cache of its own (gemma3n.py).
        if index < own or own - (2 if types[index] == SLIDING else 1) < 0
    )


def gemma4(rank: Rank) -> tuple[Layer, ...]:
    """Full layers have larger heads (`global_head_dim`), and other KV heads where `attention_k_eq_v` is true.

    The last layer is full whatever the file says (Gemma4TextConfig). K and V are both stored even where they are equal.
    """
    text, count = rank.text, rank.num_layers()
    if text.values.get("use_bidirectional_attention") == "all":
        raise text.error(
            "use_bidirectional_attention",
            'is "all"',
            "whether a KV cache is kept: bidirectional attention keeps none",
            "Plan a model that generates text.",
        )
    types = stated_types(text, count, _TYPES) or every_nth_full(
        text, count, 6, "every 6th layer is full in Gemma4TextConfig"
    )
    types = (*types[:-1], FULL)
    own = _own_layers(rank, count)
    missing = set(types[own:]) - set(types[:own])
    if missing:
        raise text.error(
            "num_kv_shared_layers",
            f"leaves no {missing.pop()} layer that shared layers could reuse",
            "which layers keep a cache",
            "Both must come from the same checkpoint.",
        )
    kinds, heads = windowed_kinds(text, types), _gemma4_heads(rank, types)
    return tuple(
        Layer(index=index, part="attn", cache=attention(rank, kinds[index], heads[index])) for index in range(own)
    )


def _gemma4_heads(rank: Rank, types: tuple[str, ...]) -> tuple[Heads, ...]:
    sliding = stated_heads(rank)
    stated = rank.text.section("per_layer_config", _DIFFERENCES)
    if stated is not None:  # transformers 5 writes the differences out, and then reads nothing else
        overrides = _overrides(stated, sliding, len(types))
        return tuple(overrides.get(index, sliding) for index in range(len(types)))
    text = rank.text
    full = replace(sliding, size=text.integer("global_head_dim", "the size of a key in full layers"))
    if text.flag("attention_k_eq_v", "whether full layers have KV heads of their own"):
        kv_heads = text.optional_integer("num_global_key_value_heads", "the KV heads of full layers")
        full = replace(full, kv_heads=kv_heads or sliding.kv_heads)
    return tuple(full if word == FULL else sliding for word in types)


def _overrides(stated: Fields, common: Heads, count: int) -> dict[int, Heads]:
    """Heads of the layers that have some of their own, by layer. transformers pads the numbers with zeros (`05`)."""
    heads = {}
    for key in stated.values:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 6 and int(key) < count):
            raise stated.error(
                str(key)[:40], "is no layer of this model", _DIFFERENCES, f"Layers are 0 to {count - 1}."
            )
        entry = stated.section(key, _DIFFERENCES)
        if entry is not None:
            size = entry.optional_integer("head_dim", "the size of a key in that layer")
            kv_heads = entry.optional_integer("num_key_value_heads", "the KV heads of that layer")
            heads[int(key)] = replace(common, size=size or common.size, kv_heads=kv_heads or common.kv_heads)
    return heads


def _own_layers(rank: Rank, count: int) -> int:
    """How many layers, from the first on, keep a cache of their own."""
    why = "how many of the last layers reuse an earlier cache"
    shared = rank.text.integer("num_kv_shared_layers", why, low=0, high=MAX_LAYERS)
    if shared > count:
        raise rank.text.error("num_kv_shared_layers", f"is {shared} of {count} layers", why, "It must be smaller.")
    return count - shared
