"""Models whose sliding layers have other heads than their full ones: MiMo-V2 and Step-3.5.

Sources: vLLM's mimo_v2.py and step3p5.py. Both take the model-wide window away and decide layer by layer.
"""

from __future__ import annotations

from dataclasses import replace

from connector.plan.kinds import Full
from hma_cli.models.architectures.attention import FULL, SLIDING, Heads, attention, kind_of, too_short, window_of
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Layer


def mimo_v2(rank: Rank) -> tuple[Layer, ...]:
    """1 in `hybrid_layer_pattern` slides, 0 is full; values may be narrower than keys.

    `attention_chunk_size` is in the file and means nothing (vLLM strips it, `_strip_mimo_v2_attention_chunk_size`).
    """
    text, count = rank.text, rank.num_layers()
    pattern = text.integers("hybrid_layer_pattern", "which layers slide (1)", high=1)
    if pattern is None or len(pattern) < count:
        state = "is missing" if pattern is None else f"has {len(pattern)} entries for {count} layers"
        raise text.error("hybrid_layer_pattern", state, "which layers slide (1)", "Give 0 or 1 for each layer.")
    full = attention(rank, Full(), _mimo_heads(rank, ""))
    sliding = full
    if 1 in pattern[:count]:
        window = text.integer("sliding_window_size", "how far sliding layers see")
        sliding = attention(rank, kind_of(window), _mimo_heads(rank, "swa_"))
    return tuple(Layer(index=index, part="attn", cache=sliding if pattern[index] else full) for index in range(count))


def _mimo_heads(rank: Rank, prefix: str) -> Heads:
    text = rank.text
    layers = "sliding" if prefix else "full"
    return Heads(
        heads=text.integer(f"{prefix}num_attention_heads", f"the query heads of {layers} layers"),
        kv_heads=text.integer(f"{prefix}num_key_value_heads", f"the KV heads of {layers} layers"),
        size=text.integer(f"{prefix}head_dim", f"the size of a key in {layers} layers"),
        size_v=text.optional_integer(f"{prefix}v_head_dim", f"the size of a value in {layers} layers"),
    )


def step3p5(rank: Rank) -> tuple[Layer, ...]:
    """KV heads are called `num_attention_groups`; `attention_other_setting` overrides the heads of one layer type.

    `layer_types` may go on after the last layer: those entries belong to the MTP layers.
    """
    text, count = rank.text, rank.num_layers()
    types = text.words("layer_types", "which layers slide", (FULL, SLIDING))
    if types is not None and len(types) < count:
        raise too_short(text, "layer_types", len(types), count)
    common = Heads(
        heads=text.integer("num_attention_heads", "the query heads, which tensor parallelism divides"),
        kv_heads=text.integer("num_attention_groups", "the heads whose keys and values are kept"),
        size=0,
    )
    stated = text.optional_integer("head_dim", "the size of a key")
    other_type, other, other_size = _step_override(rank, common)
    window = window_of(text)
    layers = []
    for index in range(count):
        # Without layer_types, vLLM lets even layers slide.
        word = types[index] if types else (FULL if index % 2 else SLIDING)
        overridden = bool(types) and word == other_type
        heads = other if overridden else common
        size = (other_size if overridden else None) or stated or _step_size(rank, heads)
        kind = kind_of(window if word == SLIDING else None)
        layers.append(Layer(index=index, part="attn", cache=attention(rank, kind, replace(heads, size=size))))
    return tuple(layers)


def _step_override(rank: Rank, common: Heads) -> tuple[str | None, Heads, int | None]:
    """The layer type that has heads of its own, those heads, and their size where it is stated."""
    setting = rank.text.section("attention_other_setting", "the heads of one layer type")
    if setting is None:
        return None, common, None
    word = setting.word("attention_type", "which layers these heads are of", (FULL, SLIDING))
    if word is None:
        raise setting.error("attention_type", "is missing", "which layers these heads are of", "Name the layer type.")
    heads = setting.optional_integer("num_attention_heads", "the query heads of these layers")
    kv_heads = setting.optional_integer("num_attention_groups", "the KV heads of these layers")
    size = setting.optional_integer("head_dim", "the size of a key in these layers")
    return word, Heads(heads=heads or common.heads, kv_heads=kv_heads or common.kv_heads, size=0), size


def _step_size(rank: Rank, heads: Heads) -> int:
    hidden = rank.text.integer("hidden_size", "the size of a head, hidden_size / num_attention_heads")
    if hidden % heads.heads:
        raise rank.text.error(
            "hidden_size", f"is {hidden}, not a multiple of {heads.heads} heads", "the size of a head", "Add head_dim."
        )
    return rank.text.derive("head_dim", hidden // heads.heads, "hidden_size / num_attention_heads")
