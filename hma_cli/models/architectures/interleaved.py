"""Full attention beside attention with a window or within chunks, decided layer by layer.

Sources: vLLM's gemma2.py, gemma3.py, exaone4.py, gpt_oss.py, commandr.py, llama4.py and transformers/base.py (OLMo 3,
SmolLM3, Ministral), with the layer patterns of transformers' configuration classes.
"""

from __future__ import annotations

from connector.plan.kinds import ChunkedLocal, Full
from hma_cli.models.architectures.attention import (
    FULL,
    SLIDING,
    attention_layers,
    every_nth_full,
    kind_of,
    model_window,
    stated_heads,
    stated_types,
    too_short,
    window_of,
    windowed_kinds,
)
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Layer

_TYPES = (FULL, SLIDING)


def gemma2(rank: Rank) -> tuple[Layer, ...]:
    """Every second layer is full."""
    return _interleaved(rank, 2, "every 2nd layer is full in Gemma2Config")


def olmo3(rank: Rank) -> tuple[Layer, ...]:
    """Every fourth layer is full."""
    return _interleaved(rank, 4, "every 4th layer is full in Olmo3Config")


def gemma3(rank: Rank) -> tuple[Layer, ...]:
    """Layer n is full where n + 1 is a multiple of `sliding_window_pattern`, which is 6 unless the file says so."""
    rank_text = rank.text
    if rank_text.flag("use_bidirectional_attention", "whether a KV cache is kept at all"):
        raise rank_text.error(
            "use_bidirectional_attention",
            "is true",
            "whether a KV cache is kept: bidirectional attention keeps none",
            "Plan a model that generates text.",
        )
    return _interleaved(rank, None, "sliding_window_pattern")


def exaone4(rank: Rank) -> tuple[Layer, ...]:
    """As Gemma 3 with a pattern of 4. A pattern written as letters is of use only beside `layer_types`."""
    return _interleaved(rank, None, "sliding_window_pattern")


def cohere2(rank: Rank) -> tuple[Layer, ...]:
    """Sliding layers see one token more than the file says: vLLM's window counts the query itself (commandr.py)."""
    text = rank.text
    types = _types(rank, None, "sliding_window_pattern")
    if SLIDING not in types:
        return attention_layers(rank, (Full(),) * len(types), stated_heads(rank))
    window = text.integer("sliding_window", "how far sliding layers see")
    text.record("sliding window in use", window + 1, "sliding_window + 1 in vLLM's commandr.py")
    sliding, full = kind_of(window + 1), Full()
    return attention_layers(rank, (sliding if word == SLIDING else full for word in types), stated_heads(rank))


def gpt_oss(rank: Rank) -> tuple[Layer, ...]:
    """Even layers slide, whatever `layer_types` says; each rank keeps whole KV heads of its own (gpt_oss.py)."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, _TYPES)
    sliding = kind_of(window_of(text))
    other = kind_of(model_window(text, types)) if types is not None else Full()
    text.record("layer kinds", count, "even layers slide in vLLM's gpt_oss.py")
    heads = stated_heads(rank)
    rank.divide("KV heads", heads.kv_heads)
    return attention_layers(rank, (other if index % 2 else sliding for index in range(count)), heads)


def llama4(rank: Rank) -> tuple[Layer, ...]:
    """Layers without rotary positions see everything, the others their chunk. `layer_types` is not read (llama4.py)."""
    text, count = rank.text, rank.num_layers()
    rope = text.integers("no_rope_layers", "which layers see everything (0) or their chunk (1)", high=1)
    if not rope:
        interval = text.integer("no_rope_layer_interval", "every how many layers one sees everything")
        rope = tuple(int((index + 1) % interval != 0) for index in range(count))
        text.record("no_rope_layers", rope, f"every {interval}th layer is 0 in Llama4TextConfig")
    if len(rope) < count:
        raise too_short(text, "no_rope_layers", len(rope), count)
    chunk = text.optional_integer("attention_chunk_size", "how far chunked layers see", low=0)
    chunked = ChunkedLocal(chunk) if chunk else Full()
    return attention_layers(rank, (chunked if rope[index] else Full() for index in range(count)), stated_heads(rank))


def smollm3(rank: Rank) -> tuple[Layer, ...]:
    """Layers without rotary positions slide, where `use_sliding_window` is true (SmolLM3Config)."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, _TYPES)
    if types is None:
        uses = text.flag("use_sliding_window", "whether the window is in use") and window_of(text) is not None
        types = _smollm3_types(rank, count) if uses else (FULL,) * count
    return attention_layers(rank, windowed_kinds(text, types), stated_heads(rank))


def _smollm3_types(rank: Rank, count: int) -> tuple[str, ...]:
    text = rank.text
    rope = text.integers("no_rope_layers", "which layers slide (0)", high=1)
    if rope is None:
        interval = text.integer("no_rope_layer_interval", "every how many layers one slides")
        rope = tuple(int((index + 1) % interval != 0) for index in range(count))
    if len(rope) < count:
        raise too_short(text, "no_rope_layers", len(rope), count)
    return tuple(FULL if rope[index] else SLIDING for index in range(count))


def ministral(rank: Rank) -> tuple[Layer, ...]:
    """`layer_types`, else all layers slide where there is a window (MinistralConfig)."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, _TYPES)
    if types is None:
        types = (FULL if window_of(text) is None else SLIDING,) * count
    return attention_layers(rank, windowed_kinds(text, types), stated_heads(rank))


def _interleaved(rank: Rank, nth: int | None, origin: str) -> tuple[Layer, ...]:
    types = _types(rank, nth, origin)
    return attention_layers(rank, windowed_kinds(rank.text, types), stated_heads(rank))


def _types(rank: Rank, nth: int | None, origin: str) -> tuple[str, ...]:
    """`layer_types`, else every nth layer is full; where nth is None, `origin` is the field that says which."""
    count = rank.num_layers()
    types = stated_types(rank.text, count, _TYPES)
    if types is not None:
        return types
    if nth is None:
        nth = rank.text.integer(origin, "every how many layers one is full, since layer_types is absent")
        origin = f"every {nth}th layer is full ({origin})"
    return every_nth_full(rank.text, count, nth, origin)
