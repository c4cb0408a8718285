"""Attention layers that every family is made of: heads, windows, layer types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connector.errors import ModelError
from connector.plan.kinds import ChunkedLocal, Full, SlidingWindow
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Attention, Layer
from hma_cli.models.fields import Fields

FULL = "full_attention"
SLIDING = "sliding_attention"
# transformers renames the older words when it reads a file (`remap_legacy_layer_types`).
_LEGACY = {"attention": FULL, "mamba": "linear_attention"}

AttentionKind = Full | SlidingWindow | ChunkedLocal


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Of one attention layer, in the whole model. size: elements of a key, and of a value where size_v is None."""

    heads: int
    kv_heads: int
    size: int
    size_v: int | None = None


def stated_heads(rank: Rank) -> Heads:
    """Heads of a model that may state its head size; else it is hidden_size / num_attention_heads."""
    text = rank.text
    heads = text.integer("num_attention_heads", "the query heads, which tensor parallelism divides")
    kv_heads = text.optional_integer("num_key_value_heads", "the heads whose keys and values are kept")
    if kv_heads is None:
        kv_heads = text.derive("num_key_value_heads", heads, "num_attention_heads")
    size = text.optional_integer("head_dim", "the size of a key", low=0)
    return Heads(heads=heads, kv_heads=kv_heads, size=size or _divided_size(text, heads))


def derived_heads(rank: Rank) -> Heads:
    """Heads of a model whose vLLM class divides hidden_size and does not look at head_dim."""
    text = rank.text
    heads = text.integer("num_attention_heads", "the query heads, which tensor parallelism divides")
    kv_heads = text.optional_integer("num_key_value_heads", "the heads whose keys and values are kept")
    if kv_heads is None:
        kv_heads = text.derive("num_key_value_heads", heads, "num_attention_heads")
    return Heads(heads=heads, kv_heads=kv_heads, size=_divided_size(text, heads))


def _divided_size(text: Fields, heads: int) -> int:
    hidden = text.integer("hidden_size", "the size of a head, hidden_size / num_attention_heads")
    if hidden % heads:
        raise text.error(
            "hidden_size",
            f"is {hidden}, not a multiple of {heads} attention heads",
            "the size of a head",
            "Add the field head_dim, or correct the two.",
        )
    return text.derive("head_dim", hidden // heads, "hidden_size / num_attention_heads")


def attention(rank: Rank, kind: AttentionKind, heads: Heads) -> Attention:
    return rank.attention(
        kind, heads=heads.heads, kv_heads=heads.kv_heads, head_size=heads.size, head_size_v=heads.size_v
    )


def attention_layers(rank: Rank, kinds: Iterable[AttentionKind], heads: Heads) -> tuple[Layer, ...]:
    """One attention layer for each kind, all with the same heads."""
    made: dict[AttentionKind, Attention] = {}
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in made:
            made[kind] = attention(rank, kind, heads)
        layers.append(Layer(index=index, part="attn", cache=made[kind]))
    return tuple(layers)


def kind_of(window: int | None) -> Full | SlidingWindow:
    return Full() if window is None else SlidingWindow(window)


def window_of(text: Fields, key: str = "sliding_window") -> int | None:
    """The window that the file states; 0 switches it off, like null (vLLM's config/model.py)."""
    return text.optional_integer(key, "how far sliding layers see", low=0) or None


def stated_types(text: Fields, count: int, choices: Sequence[str], key: str = "layer_types") -> tuple[str, ...] | None:
    """`layer_types`, one word for each layer, in today's words; None where the file has none."""
    found = text.words(key, "the kind of each layer", (*choices, *_legacy_words(choices)))
    if found is None:
        return None
    if len(found) != count:
        raise too_short(text, key, len(found), count)
    return tuple(_LEGACY.get(word, word) for word in found)


def every_nth_full(text: Fields, count: int, nth: int, origin: str, other: str = SLIDING) -> tuple[str, ...]:
    """The pattern in which layers nth - 1, 2·nth - 1, … are full and all others are not."""
    types = tuple(other if (index + 1) % nth else FULL for index in range(count))
    text.record("layer_types", types, origin)
    return types


def model_window(text: Fields, types: tuple[str, ...] | None) -> int | None:
    """The window that vLLM applies to every layer that has none of its own.

    `EngineArgs.create_engine_config` takes it only where `layer_types` is absent or names sliding layers only: a full
    layer of an interleaved model must not inherit it.
    """
    if types is not None and any(word != SLIDING for word in types):
        return None
    return window_of(text)


def windowed_kinds(text: Fields, types: tuple[str, ...]) -> tuple[Full | SlidingWindow, ...]:
    """Sliding layers get the model's window, the others none."""
    window = window_of(text) if SLIDING in types else None
    sliding, full = kind_of(window), Full()
    return tuple(sliding if word == SLIDING else full for word in types)


def too_short(text: Fields, key: str, found: int, count: int) -> ModelError:
    """A list that has not one entry for each layer."""
    return text.error(key, f"has {found} entries for {count} layers", "the kind of each layer", "Give one for each.")


def _legacy_words(choices: Sequence[str]) -> tuple[str, ...]:
    return tuple(old for old, new in _LEGACY.items() if new in choices)
