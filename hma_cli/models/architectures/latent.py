"""Latent attention: DeepSeek V2, V3 and V3.2, and Kimi Linear, which mixes it with recurrent layers.

Sources: vLLM's deepseek_v2.py, models/deepseek_v32/attention.py, models/kimi_k3, layers/attention/mla_attention.py.
"""

from __future__ import annotations

from hma_cli.models.architectures import states
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Latent, Layer
from hma_cli.models.fields import MAX_LAYERS, Fields

# The sparse backends store a quantized latent as 512 fp8 values, 4 scales and 64 positions in 16 bits: 656 bytes.
_FP8_DS_MLA_BYTES = 656
_FP8_DS_MLA_WIDTH = 576
# The indexer keeps fp8 keys with one float32 scale for each 128 of them.
_INDEXER_SCALED = 128


def deepseek(rank: Rank) -> tuple[Layer, ...]:
    """One latent a token in each layer, `kv_lora_rank + qk_rope_head_dim` wide; the file's KV heads do not count."""
    latent = _latent(rank)
    return tuple(Layer(index=index, part="mla", cache=latent) for index in range(rank.num_layers()))


def deepseek_v32(rank: Rank) -> tuple[Layer, ...]:
    """As V3, with an indexer's keys beside the latent. A layer may reuse an earlier layer's choice of tokens
    (`index_topk_freq`, `index_topk_pattern`), and then has no indexer."""
    text = rank.text
    text.integer("index_topk", "the indexer that makes this attention sparse")
    size = text.integer("index_head_dim", "the keys that the indexer keeps")
    if size % _INDEXER_SCALED:
        raise text.error("index_head_dim", f"is {size}", "keys with one scale for each 128", "Give a multiple of 128.")
    indexer = rank.latent(size + size // _INDEXER_SCALED * 4)
    latent = _latent(rank, sparse=True)
    layers: list[Layer] = []
    for index in range(rank.num_layers()):
        if _has_indexer(text, index):
            layers.append(Layer(index=index, part="indexer", cache=indexer))
        layers.append(Layer(index=index, part="mla", cache=latent))
    return tuple(layers)


def _has_indexer(text: Fields, index: int) -> bool:
    pattern = text.text("index_topk_pattern", "which layers have an indexer", high=MAX_LAYERS)
    if pattern is not None:
        return index >= len(pattern) or pattern[index] != "S"
    every = text.optional_integer("index_topk_freq", "which layers have an indexer") or 1
    offset = text.optional_integer("index_skip_topk_offset", "which layers have an indexer", low=0)
    return max(index - (2 if offset is None else offset) + 1, 0) % every == 0


def kimi_linear(rank: Rank) -> tuple[Layer, ...]:
    """`linear_attn_config.kda_layers` lists the recurrent layers, counted from 1; all others are latent."""
    text, count = rank.text, rank.num_layers()
    linear = text.section("linear_attn_config", "which layers are recurrent")
    if linear is None:
        raise text.error("linear_attn_config", "is missing", "which layers are recurrent", "Add the object.")
    numbers = linear.integers("kda_layers", "which layers are recurrent, counted from 1", low=1, high=MAX_LAYERS)
    if numbers is None:
        raise linear.error("kda_layers", "is missing", "which layers are recurrent, counted from 1", "Add the list.")
    recurrent = set(numbers)
    state = states.kimi_delta(
        rank,
        heads=linear.integer("num_heads", "the recurrent state"),
        head_size=linear.integer("head_dim", "the recurrent state"),
        kernel=linear.integer("short_conv_kernel_size", "the recurrent state", low=2, high=MAX_LAYERS),
    )
    latent = _latent(rank)
    return tuple(
        Layer(index=index, part="state", cache=state)
        if index + 1 in recurrent
        else Layer(index=index, part="mla", cache=latent)
        for index in range(count)
    )


def _latent(rank: Rank, *, sparse: bool = False) -> Latent:
    text = rank.text
    rank.divide("attention heads", text.integer("num_attention_heads", "the query heads, which TP divides"))
    latent = text.integer("kv_lora_rank", "the width of the latent")
    width = latent + text.integer("qk_rope_head_dim", "the positions beside the latent")
    text.derive("width of a latent", width, "kv_lora_rank + qk_rope_head_dim")
    if sparse and rank.kv_item_bytes == 1:
        if width != _FP8_DS_MLA_WIDTH:
            raise text.error(
                "kv_lora_rank",
                f"gives latents {width} wide",
                f"vLLM's fp8_ds_mla format, which holds {_FP8_DS_MLA_WIDTH}",
                "Plan without a quantized KV cache.",
            )
        text.record("KV cache dtype", "fp8_ds_mla", "vLLM's sparse latent attention stores fp8 this way")
        return rank.latent(_FP8_DS_MLA_BYTES)
    return rank.latent(width * rank.kv_item_bytes)
