"""Attention layers beside recurrent ones, and models of recurrent layers only.

Sources: vLLM's qwen3_next.py, qwen3_5.py, nemotron_h.py, jamba.py, falcon_h1.py, granitemoehybrid.py, lfm2.py,
lfm2_moe.py, mamba.py and mamba2.py, with the layer patterns of transformers' configuration classes.
"""

from __future__ import annotations

from connector.plan.kinds import Full
from hma_cli.models.architectures import states
from hma_cli.models.architectures.attention import (
    FULL,
    attention,
    derived_heads,
    every_nth_full,
    kind_of,
    stated_heads,
    stated_types,
    window_of,
)
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Cache, Layer, Recurrent
from hma_cli.models.fields import MAX_LAYERS, Fields
from hma_cli.models.options import AUTO, MODEL_DTYPES

LINEAR = "linear_attention"
CONV = "conv"
_DTYPES = (AUTO, *MODEL_DTYPES)
_PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_STATE = "the recurrent state"


def qwen3_next(rank: Rank) -> tuple[Layer, ...]:
    """Every fourth layer has full attention (`full_attention_interval`), the others a gated delta net."""
    return _qwen_hybrid(rank, None, "")


def qwen3_5(rank: Rank) -> tuple[Layer, ...]:
    """As Qwen3-Next; the file's `mamba_ssm_dtype` decides the state's dtype (Qwen3_5ForConditionalGenerationConfig)."""
    dtype = rank.text.word("mamba_ssm_dtype", "the bytes of the state", _DTYPES)
    return _qwen_hybrid(rank, dtype, "mamba_ssm_dtype in config.json")


def _qwen_hybrid(rank: Rank, ssm_dtype: str | None, origin: str) -> tuple[Layer, ...]:
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, (FULL, LINEAR))
    if types is None:
        interval = text.integer("full_attention_interval", "every how many layers one is full")
        types = every_nth_full(text, count, interval, f"every {interval}th layer is full", LINEAR)
    state = states.gated_delta(
        rank,
        key_heads=text.integer("linear_num_key_heads", _STATE),
        value_heads=text.integer("linear_num_value_heads", _STATE),
        key_size=text.integer("linear_key_head_dim", _STATE),
        value_size=text.integer("linear_value_head_dim", _STATE),
        kernel=_kernel(text, "linear_conv_kernel_dim"),
        ssm_dtype=ssm_dtype,
        ssm_origin=origin,
    )
    return _either(types, attention(rank, Full(), stated_heads(rank)), state)


def nemotron_h(rank: Rank) -> tuple[Layer, ...]:
    """One letter or word for each layer: M state, * attention, - and E neither. `num_hidden_layers` does not count.

    The head size is `head_dim`; older files say `attention_head_dim`, which nobody reads. The state proper is float32
    unless the file's `mamba_ssm_cache_dtype` says otherwise (NemotronHForCausalLMConfig).
    """
    text = rank.text
    types = _nemotron_types(text)
    dtype = text.word("mamba_ssm_cache_dtype", "the bytes of the state", _DTYPES)
    heads, head_size = text.integer("mamba_num_heads", _STATE), text.integer("mamba_head_dim", _STATE)
    state = states.mamba2(
        rank,
        channels=heads * head_size,
        # transformers takes the names of other families as well, and lets them win.
        groups=text.integer("mamba_n_groups" if text.has("mamba_n_groups") else "n_groups", _STATE),
        heads=heads,
        head_size=head_size,
        state_size=text.integer("ssm_state_size", _STATE),
        kernel=_kernel(text, "mamba_d_conv" if text.has("mamba_d_conv") else "conv_kernel"),
        ssm_dtype=dtype or "float32",
        ssm_origin="mamba_ssm_cache_dtype, float32 unless config.json says otherwise",
    )
    window = window_of(text)
    return _either(types, attention(rank, kind_of(window), stated_heads(rank)), state)


def _nemotron_types(text: Fields) -> tuple[str, ...]:
    why = "the kind of each layer"
    for key in ("layers_block_type", "layer_types"):
        words = text.words(key, why, (*_PATTERN.values(), "mamba", "attention"))
        if words:
            return tuple({"mamba": LINEAR, "attention": FULL}.get(word, word) for word in words)
    pattern = text.text("hybrid_override_pattern", why, high=MAX_LAYERS)
    if pattern is None:
        raise text.error("hybrid_override_pattern", "is missing", why, "Give one letter for each layer: M, *, - or E.")
    unknown = sorted(set(pattern) - set(_PATTERN))
    if unknown:
        raise text.error(
            "hybrid_override_pattern", f"has a letter {unknown[0]!r}", why, "Known letters: M, *, - and E."
        )
    return tuple(_PATTERN[letter] for letter in pattern)


def jamba(rank: Rank) -> tuple[Layer, ...]:
    """Layer n has attention where n % attn_layer_period == attn_layer_offset, else Mamba 1. No window is ever used."""
    text, count = rank.text, rank.num_layers()
    period = text.integer("attn_layer_period", "which layers have attention")
    offset = text.integer("attn_layer_offset", "which layers have attention", low=0)
    types = tuple(FULL if index % period == offset else LINEAR for index in range(count))
    text.record("layers_block_type", types, "attn_layer_period, attn_layer_offset")
    expand, hidden = text.integer("mamba_expand", _STATE), text.integer("hidden_size", _STATE)
    state = states.mamba1(
        rank,
        channels=expand * hidden,
        state_size=text.integer("mamba_d_state", _STATE),
        kernel=_kernel(text, "mamba_d_conv"),
    )
    return _either(types, attention(rank, Full(), derived_heads(rank)), state)


def falcon_h1(rank: Rank) -> tuple[Layer, ...]:
    """Every layer has attention and Mamba 2 side by side; vLLM builds the attention first.

    It needs another number for each, and numbers the states after all layers: that of layer 0 of 44 is number 44.
    """
    text, count = rank.text, rank.num_layers()
    _refuse_window(text)
    channels = text.optional_integer("mamba_d_ssm", _STATE)
    if channels is None:
        channels = text.derive("mamba_d_ssm", _expanded(text), "mamba_expand * hidden_size")
    full, state = attention(rank, Full(), stated_heads(rank)), _mamba2_by_prefix(rank, channels)
    return tuple(
        Layer(index=first + index, part=part, cache=cache)
        for index in range(count)
        for first, part, cache in ((0, "attn", full), (count, "state", state))
    )


def granite_hybrid(rank: Rank) -> tuple[Layer, ...]:
    """`layer_types`: `mamba` or `attention`; all Mamba 2 where the file has none (GraniteMoeHybridConfig)."""
    text, count = rank.text, rank.num_layers()
    key = "layers_block_type" if text.has("layers_block_type") and not text.has("layer_types") else "layer_types"
    types = stated_types(text, count, (FULL, LINEAR), key)
    if types is None:
        types = (LINEAR,) * count
        text.record("layer_types", types, "all layers are Mamba in GraniteMoeHybridConfig")
    state = _mamba2_by_prefix(rank, _expanded(text)) if LINEAR in types else None
    full = attention(rank, Full(), derived_heads(rank)) if FULL in types else None
    return _either(types, full, state)


def lfm2(rank: Rank) -> tuple[Layer, ...]:
    """`layer_types`, else attention where `full_attn_idxs` says so; the other layers are short convolutions."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, (FULL, CONV))
    if types is None:
        indices = text.integers("full_attn_idxs", "which layers have attention", high=MAX_LAYERS)
        types = tuple(FULL if indices is None or index in indices else CONV for index in range(count))
        text.record("layer_types", types, "full_attn_idxs")
    return _short_conv_hybrid(rank, types, "conv_dim")


def lfm2_moe(rank: Rank) -> tuple[Layer, ...]:
    """As LFM2, with convolutions as wide as the model."""
    text, count = rank.text, rank.num_layers()
    types = stated_types(text, count, (FULL, CONV))
    if types is None:
        raise text.error("layer_types", "is missing", "the kind of each layer", "Give full_attention or conv for each.")
    return _short_conv_hybrid(rank, types, "hidden_size")


def mamba(rank: Rank) -> tuple[Layer, ...]:
    """Mamba 1 in every layer. The width is the file's `intermediate_size`, even where `expand` says otherwise."""
    text, count = rank.text, rank.num_layers()
    channels = text.optional_integer("intermediate_size", _STATE)
    if channels is None:
        channels = text.integer("expand", _STATE) * text.integer("hidden_size", _STATE)
        text.derive("intermediate_size", channels, "expand * hidden_size")
    state = states.mamba1(
        rank, channels=channels, state_size=text.integer("state_size", _STATE), kernel=_kernel(text, "conv_kernel")
    )
    return _either((LINEAR,) * count, None, state)


def mamba2(rank: Rank) -> tuple[Layer, ...]:
    """Mamba 2 in every layer."""
    text, count = rank.text, rank.num_layers()
    channels = text.optional_integer("intermediate_size", _STATE)
    if channels is None:
        channels = text.integer("expand", _STATE) * text.integer("hidden_size", _STATE)
        text.derive("intermediate_size", channels, "expand * hidden_size")
    state = states.mamba2(
        rank,
        channels=channels,
        groups=text.integer("n_groups", _STATE),
        heads=text.integer("num_heads", _STATE),
        head_size=text.integer("head_dim", _STATE),
        state_size=text.integer("state_size", _STATE),
        kernel=_kernel(text, "conv_kernel"),
    )
    return _either((LINEAR,) * count, None, state)


def _short_conv_hybrid(rank: Rank, types: tuple[str, ...], width: str) -> tuple[Layer, ...]:
    state = states.short_conv(
        rank, channels=rank.text.integer(width, "the convolution's state"), kernel=_kernel(rank.text, "conv_L_cache")
    )
    full = attention(rank, Full(), derived_heads(rank)) if FULL in types else None
    return _either(types, full, state)


def _mamba2_by_prefix(rank: Rank, channels: int) -> Recurrent:
    """Mamba 2 of a model whose fields begin with `mamba_`. mamba_d_head may be the word `auto`: channels / heads."""
    text = rank.text
    heads = text.integer("mamba_n_heads", _STATE)
    if channels % heads:
        raise text.error("mamba_n_heads", f"is {heads}, which does not divide {channels}", _STATE, "Correct the two.")
    stated = text.values.get("mamba_d_head", AUTO)
    if stated == AUTO:
        head_size = text.derive("mamba_d_head", channels // heads, "state width / mamba_n_heads")
    else:
        head_size = text.integer("mamba_d_head", _STATE)
    return states.mamba2(
        rank,
        channels=channels,
        groups=text.integer("mamba_n_groups", _STATE),
        heads=heads,
        head_size=head_size,
        state_size=text.integer("mamba_d_state", _STATE),
        kernel=_kernel(text, "mamba_d_conv"),
    )


def _expanded(text: Fields) -> int:
    return text.integer("mamba_expand", _STATE) * text.integer("hidden_size", _STATE)


def _kernel(text: Fields, key: str) -> int:
    """A convolution's length; a state is kept only of longer ones than 1."""
    return text.integer(key, _STATE, low=2, high=MAX_LAYERS)


def _refuse_window(text: Fields) -> None:
    if window_of(text) is not None:
        raise text.error(
            "sliding_window", "is set", "nothing in this family, which has been checked without one", "Set it to null."
        )


def _either(types: tuple[str, ...], full: Cache | None, state: Recurrent | None) -> tuple[Layer, ...]:
    """Attention in full layers, a state in linear and convolution layers, nothing in the others."""
    parts = {FULL: ("attn", full), LINEAR: ("state", state), CONV: ("state", state)}
    return tuple(
        Layer(index=index, part=parts[word][0], cache=cache)
        for index, word in enumerate(types)
        if word in parts and (cache := parts[word][1]) is not None
    )
