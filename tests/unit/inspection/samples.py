"""Small models made of layers by hand, and hand-overs between engines of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

from hypothesis import strategies as st

from connector.plan.kinds import ChunkedLocal, Full, Kind, Mla, SlidingWindow, State
from hma_cli.inspection.arena import KvLayout
from hma_cli.inspection.comparison import HandOver
from hma_cli.inspection.engine import D_BASE, P_BASE, Memory, engine
from hma_cli.inspection.inspect import Inspection, Request, inspect
from hma_cli.inspection.pool import PoolState
from hma_cli.models.caches import Attention, Latent, Layer, Recurrent
from hma_cli.models.grouping import EngineOptions, Grouping, group_layers
from hma_cli.models.lookup import find

HEADS, HEAD_SIZE, ITEM = 2, 4, 2
TOKEN = HEADS * 2 * HEAD_SIZE * ITEM
"""Bytes of one token in one attention layer, all ranks together."""

LATENT = 24
"""Bytes of one latent, on every rank."""

STATE = 3 * 12 * 2 + 5 * 2 * 4 * 4
"""Bytes of one state on every rank: less than a block of 16 tokens takes, so that its page is padded."""


def layers(kinds: Sequence[Kind], tp: int = 1) -> list[Layer]:
    """One layer for each kind, on one of `tp` ranks."""
    return [_layer(index, kind, tp) for index, kind in enumerate(kinds)]


def _layer(index: int, kind: Kind, tp: int) -> Layer:
    match kind:
        case Full() | SlidingWindow() | ChunkedLocal():
            return Layer(
                index=index,
                part="attn",
                cache=Attention(
                    kind=kind,
                    heads=HEADS // tp,
                    total_heads=HEADS,
                    head_size=HEAD_SIZE,
                    head_size_v=HEAD_SIZE,
                    item_bytes=ITEM,
                ),
            )
        case Mla():
            return Layer(index=index, part="mla", cache=Latent(kind=kind, state_bytes=LATENT))
        case State():
            # as Mamba-2: 3 rows of x (10), B (1) and C (1), and 5 heads of 2 times 4
            cache = Recurrent(kind=kind, shapes=((3, 12), (5, 2, 4)), item_bytes=(2, 4), family="mamba2")
            return Layer(index=index, part="state", cache=cache)
    raise TypeError(kind)


def grouped(kinds: Sequence[Kind], *, tp: int = 1, **options: Any) -> Grouping:
    """ConfigError where vLLM refuses the mixture."""
    return group_layers(layers(kinds, tp), EngineOptions(**{"block_size": 16, **options}))


def hand_over(
    prefill: Grouping,
    decode: Grouping,
    prompt_tokens: int,
    *,
    cached_tokens: int = 0,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    kv_layout: KvLayout = KvLayout.PACKED,
    pool: PoolState = PoolState.FRESH,
    seed: int = 0,
    make: Any = engine,
) -> HandOver:
    def memory(tp: int, base: int) -> Memory:
        return Memory(tp=tp, kv_layout=kv_layout, num_tokens=prompt_tokens, pool=pool, num_blocks=None, base=base)

    return HandOver(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        prefill=make(prefill, memory(prefill_tp, P_BASE)),
        decode=make(decode, memory(decode_tp, D_BASE)),
        pool=pool,
        seed=seed,
    )


attention_kinds = st.one_of(
    st.just(Full()), st.builds(SlidingWindow, st.integers(1, 120)), st.builds(ChunkedLocal, st.integers(1, 120))
)
mixtures = st.one_of(
    st.lists(attention_kinds, min_size=1, max_size=2, unique=True).flatmap(
        lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=9)
    ),
    st.lists(st.sampled_from([Full(), State()]), min_size=1, max_size=7),
    st.lists(st.sampled_from([Mla()]), min_size=1, max_size=4),
)
"""Kinds of a model's layers, in order: attention of two sorts, attention beside states, latents."""


@cache
def inspected(model: str, **request: Any) -> Inspection:
    """The inspection of a model of the catalog."""
    return inspect(find(model, offline=True), Request(**{"prompt_tokens": 4096, **request}))


def reads(kind: Kind, query: int, key: int) -> bool:
    """Whether computing position `query` reads what position `key` left in the cache; an oracle of one line a kind."""
    match kind:
        case SlidingWindow() | Mla(window=int()):
            return query - key < kind.window
        case ChunkedLocal():
            return query // kind.chunk == key // kind.chunk
        case State():
            return query == key + 1
    return True


def still_read(kind: Kind, handed: int) -> list[int]:
    """Positions below `handed` that the next token, or the one after it, reads from the cache."""
    return [key for key in range(handed) if any(reads(kind, query, key) for query in (handed, handed + 1))]


def lengths(values: Sequence[int]) -> list[int]:
    """Lengths of stretches of consecutive numbers."""
    return [len(list(same)) for _, same in groupby(enumerate(sorted(values)), key=lambda pair: pair[1] - pair[0])]
