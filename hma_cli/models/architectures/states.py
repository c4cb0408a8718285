"""Shapes of recurrent states on one rank, as vLLM's MambaStateShapeCalculator computes them (mamba_utils.py).

All without speculative decoding. The convolution part is written (window, channels); with VLLM_SSM_CONV_STATE_LAYOUT=DS
vLLM swaps the two, which changes no size. Every function takes sizes of the whole model.
"""

from __future__ import annotations

from hma_cli.models.architectures.rank import Indivisible, Rank
from hma_cli.models.caches import Recurrent


def mamba1(rank: Rank, *, channels: int, state_size: int, kernel: int) -> Recurrent:
    """channels: the mixer's inner width."""
    local = rank.divide("state channels", channels)
    return rank.recurrent(
        "mamba1", (kernel - 1, local), (local, state_size), item_bytes=(rank.item_bytes, rank.ssm_item_bytes())
    )


def mamba2(
    rank: Rank,
    *,
    channels: int,
    groups: int,
    heads: int,
    head_size: int,
    state_size: int,
    kernel: int,
    ssm_dtype: str | None = None,
    ssm_origin: str = "",
) -> Recurrent:
    """groups: of input and output projections. A single group is copied to every rank; several must divide evenly
    (MambaMixer2). ssm_dtype: the model family's own rule for the state proper."""
    if groups % rank.tp and groups != 1:
        raise Indivisible(f"{rank.config.name}: {groups} state groups cannot be split over {rank.tp} ranks.")
    total_groups = max(groups, rank.tp) if groups == 1 else groups
    return rank.recurrent(
        "mamba2",
        (kernel - 1, rank.divide("convolution channels", channels + 2 * total_groups * state_size)),
        (rank.divide("state heads", heads), head_size, state_size),
        item_bytes=(rank.item_bytes, rank.ssm_item_bytes(ssm_dtype, ssm_origin)),
    )


def gated_delta(
    rank: Rank,
    *,
    key_heads: int,
    value_heads: int,
    key_size: int,
    value_size: int,
    kernel: int,
    ssm_dtype: str | None = None,
    ssm_origin: str = "",
) -> Recurrent:
    """Gated delta net: queries, keys and values pass through the convolution together."""
    rank.divide("linear key heads", key_heads)
    return rank.recurrent(
        "gdn",
        (kernel - 1, rank.divide("convolution channels", 2 * key_heads * key_size + value_heads * value_size)),
        (rank.divide("linear value heads", value_heads), value_size, key_size),
        item_bytes=(rank.item_bytes, rank.ssm_item_bytes(ssm_dtype, ssm_origin)),
    )


def kimi_delta(rank: Rank, *, heads: int, head_size: int, kernel: int) -> Recurrent:
    """Kimi delta attention. Its state is float32 whatever the model's dtype is (`kda_state_dtype`)."""
    local = rank.divide("linear attention heads", heads)
    return rank.recurrent(
        "kda",
        (kernel - 1, rank.divide("convolution channels", 3 * heads * head_size)),
        (local, head_size, head_size),
        item_bytes=(rank.item_bytes, rank.ssm_item_bytes("float32", "rule of vLLM's kda_state_dtype")),
    )


def short_conv(rank: Rank, *, channels: int, kernel: int) -> Recurrent:
    """A convolution alone (LFM2)."""
    return rank.recurrent(
        "short_conv", (kernel - 1, rank.divide("convolution channels", channels)), item_bytes=(rank.item_bytes,)
    )
