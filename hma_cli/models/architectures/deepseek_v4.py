"""DeepSeek V4: in every layer the last 128 tokens as they are, and compressed tokens beside them.

Sources: vLLM's models/deepseek_v4/attention.py and compressor.py, v1/attention/backends/mla/sparse_swa.py. Only the
fp8_ds_mla layout is covered: plain rows are the choice of one backend, and its pages differ.

With `compress_ratios` 4 or 128, one stored vector stands for that many tokens. A compressor works on a window of raw
tokens, which it keeps as a sliding window in small blocks of its own.
"""

from __future__ import annotations

from connector.errors import ConfigError
from hma_cli.models.architectures.rank import Rank
from hma_cli.models.caches import Latent, Layer
from hma_cli.models.fields import Fields

_BLOCK = 256  # the indexer's backend takes no other (DeepseekV4IndexerBackend)
_WINDOW_BLOCK = 64
# 448 fp8 values, 64 positions in 16 bits, 8 scales; pages end at a multiple of the decode kernel's stride.
_VECTOR_BYTES = 584
_PAGE_MULTIPLE = 576
_HEAD_SIZE = 512
_INDEXER_SIZE = 128
_INDEXER_BYTES = _INDEXER_SIZE + 4  # fp8 keys and one float32 scale
_RATIOS = (0, 1, 4, 128)
# Blocks of a compressor's own window, in tokens (CompressorStateCache).
_COMPRESSOR_BLOCKS = {4: 4, 128: 8}


def deepseek_v4(rank: Rank) -> tuple[Layer, ...]:
    """Caches in vLLM's order: indexer keys, their compressor, the window, compressed vectors, their compressor."""
    text, count = rank.text, rank.num_layers()
    if rank.options.kv_dtype != "auto" and rank.kv_item_bytes != 1:
        raise ConfigError(
            f"{rank.config.name}: DeepSeek V4 keeps its cache in fp8, not in {rank.kv_dtype}.",
            remedy="Leave --kv-dtype at auto, or give fp8.",
        )
    text.record("KV cache dtype", "fp8_ds_mla", "rule of vLLM's models/deepseek_v4")
    rank.divide("attention heads", text.integer("num_attention_heads", "the query heads, which TP divides"))
    _require(text, "head_dim", _HEAD_SIZE)
    ratios = text.integers("compress_ratios", "how many tokens a stored vector stands for", high=128)
    if ratios is None or len(ratios) < count:
        state = "is missing" if ratios is None else f"has {len(ratios)} entries for {count} layers"
        raise text.error("compress_ratios", state, "what each layer keeps", "Give one number for each layer.")
    if 4 in ratios[:count]:
        _require(text, "index_head_dim", _INDEXER_SIZE)
    window = rank.latent(
        _VECTOR_BYTES,
        window=text.integer("sliding_window", "how far the uncompressed part sees"),
        block_size=_WINDOW_BLOCK,
        page_multiple=_PAGE_MULTIPLE,
    )
    # Entries beyond the last layer belong to the MTP layers.
    caches = {ratio: _caches(rank, ratio, window) for ratio in set(ratios[:count])}
    return tuple(
        Layer(index=index, part=part, cache=cache)
        for index, ratio in enumerate(ratios[:count])
        for part, cache in caches[ratio]
    )


def _caches(rank: Rank, ratio: int, window: Latent) -> tuple[tuple[str, Latent], ...]:
    if ratio not in _RATIOS:
        raise rank.text.error(
            "compress_ratios", f"has an entry {ratio}", "what each layer keeps", "vLLM knows 0, 1, 4 and 128."
        )
    if ratio <= 1:
        return (("window", window),)
    own = (
        ("window", window),
        ("mla", _compressed(rank, _VECTOR_BYTES, ratio)),
        ("compressor", _compressor(rank, _HEAD_SIZE, ratio)),
    )
    if ratio != 4:
        return own
    indexer = (
        ("indexer", _compressed(rank, _INDEXER_BYTES, ratio)),
        ("indexer_compressor", _compressor(rank, _INDEXER_SIZE, ratio)),
    )
    return (*indexer, *own)


def _compressed(rank: Rank, state_bytes: int, ratio: int) -> Latent:
    return rank.latent(state_bytes, tokens_per_state=ratio, block_size=_BLOCK, page_multiple=_PAGE_MULTIPLE)


def _compressor(rank: Rank, head_size: int, ratio: int) -> Latent:
    """float32 values and scores of tokens not yet compressed. Windows of ratio 4 overlap: twice as wide and long."""
    overlap = 2 if ratio == 4 else 1
    return rank.latent(
        2 * overlap * head_size * 4,
        window=overlap * ratio,
        block_size=_COMPRESSOR_BLOCKS[ratio],
        page_multiple=_PAGE_MULTIPLE,
    )


def _require(text: Fields, key: str, size: int) -> None:
    found = text.integer(key, "the layout of a stored vector")
    if found != size:
        raise text.error(key, f"is {found}", "the layout of a stored vector", f"vLLM's layout holds {size} elements.")
