"""Our groups, block sizes, pages and capacities are those of vLLM's own functions, for layers of every mix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError
from connector.plan.kinds import ChunkedLocal, Full, Mla, SlidingWindow, State
from hma_cli.models.caches import Attention, Cache, Latent, Layer, Recurrent
from hma_cli.models.capacity import Load, capacity
from hma_cli.models.grouping import CacheGroup, EngineOptions, Grouping, group_layers

pytest.importorskip("vllm")
reference = pytest.importorskip("tests.unit.models.vllm_reference")

KIND_NAMES = {
    Full.name: "full_attention",
    SlidingWindow.name: "sliding_window",
    ChunkedLocal.name: "chunked_local_attention",
    State.name: "mamba",
}

heads = st.sampled_from([1, 1, 2, 4, 3])
head_sizes = st.sampled_from([64, 64, 128, 96, 192, 256])
windows = st.sampled_from([64, 128, 1000])
kinds: st.SearchStrategy[Full | SlidingWindow | ChunkedLocal] = st.one_of(
    st.just(Full()), st.builds(SlidingWindow, windows), st.builds(ChunkedLocal, windows)
)


@st.composite
def attention(draw: st.DrawFn) -> Attention:
    kind = draw(kinds)
    num_heads, size = draw(heads), draw(head_sizes)
    return Attention(
        kind=kind,
        heads=num_heads,
        total_heads=num_heads * draw(st.sampled_from([1, 2])),
        head_size=size,
        head_size_v=draw(st.sampled_from([size, size, 128])),
        item_bytes=draw(st.sampled_from([2, 2, 1])),
    )


# Attention as models with states have it: one number of heads and one width, and no narrower values.
square_attention = st.sampled_from(
    [
        Attention(kind=Full(), heads=2, total_heads=2, head_size=64, head_size_v=64, item_bytes=2),
        Attention(kind=SlidingWindow(128), heads=2, total_heads=2, head_size=64, head_size_v=64, item_bytes=2),
    ]
)

state = st.builds(
    lambda conv, rest, family: Recurrent(
        kind=State(), shapes=(conv, *rest), item_bytes=(2, 4)[: 1 + len(rest)], family=family
    ),
    st.tuples(st.integers(1, 4), st.sampled_from([64, 100, 4096])),
    st.lists(st.tuples(st.integers(1, 20), st.just(16), st.just(64)), max_size=1),
    st.sampled_from(["mamba1", "mamba2"]),
)

latent = st.sampled_from(
    [
        Latent(kind=Mla(), state_bytes=1152),
        Latent(kind=Mla(), state_bytes=576),
        Latent(kind=Mla(), state_bytes=132),
        Latent(kind=Mla(), state_bytes=656, page_multiple=576),
        Latent(kind=Mla(), state_bytes=144, page_multiple=1024),
    ]
)


# Latents as DeepSeek-V4 has them; a window stands for one shape.
dictated = st.sampled_from(
    [
        Latent(kind=Mla(128), state_bytes=584, block_size=64, page_multiple=576),
        Latent(kind=Mla(8), state_bytes=4096, block_size=4, page_multiple=576),
        Latent(kind=Mla(127), state_bytes=2048, block_size=8, page_multiple=576),
        Latent(kind=Mla(), state_bytes=584, tokens_per_state=4, block_size=256, page_multiple=576),
        Latent(kind=Mla(), state_bytes=584, tokens_per_state=128, block_size=256, page_multiple=576),
        Latent(kind=Mla(), state_bytes=132, tokens_per_state=4, block_size=256, page_multiple=576),
    ]
)


@st.composite
def stacks(draw: st.DrawFn, caches: st.SearchStrategy[Cache], most: int = 4) -> list[Layer]:
    """Up to `most` different caches, each some times, in a pattern or in any order."""
    different = draw(st.lists(caches, min_size=1, max_size=most))
    counts = [draw(st.sampled_from([1, 2, 3, 5, 8, 12, 13])) for _ in different]
    if draw(st.booleans()):
        order = [cache for cache, count in zip(different, counts, strict=True) for _ in range(count)]
    else:
        order = draw(st.permutations([c for c, n in zip(different, counts, strict=True) for _ in range(min(n, 5))]))
    return [Layer(index=index, part="attn", cache=cache) for index, cache in enumerate(order)]


mixes = st.one_of(
    stacks(attention()),
    stacks(attention(), most=2),
    stacks(st.one_of(square_attention, state)),
    stacks(st.one_of(latent, state), most=3),
    stacks(st.one_of(latent, attention()), most=3),
    stacks(latent),
    stacks(state, most=2),
)
engines = st.builds(
    EngineOptions,
    block_size=st.sampled_from([None, 16, 32, 48, 128, 24]),
    device=st.sampled_from(["cuda", "cuda", "cpu"]),
    layout=st.sampled_from([None, "layer_compact"]),
    hma=st.sampled_from([True, True, False]),
    prefix_caching=st.sampled_from([None, True, False]),
    max_model_len=st.just(4096),
)
outermost = st.builds(
    EngineOptions,
    block_size=st.sampled_from([16, 64]),
    layout=st.just("block_outermost"),
    hma=st.sampled_from([True, True, True, False]),
    max_model_len=st.just(4096),
)
loads = st.builds(
    Load,
    request_tokens=st.sampled_from([1, 100, 4096, 131072]),
    max_num_batched_tokens=st.sampled_from([64, 2048, 8192]),
    concurrent_batches=st.integers(1, 2),
)


def kind_name(group: CacheGroup) -> str:
    if group.kind.name == Mla.name:
        return "sliding_window_mla" if group.kind.window else "mla_attention"
    return KIND_NAMES[group.kind.name]


def told(grouping: Grouping) -> list[tuple[str, int, list[tuple[str, int]]]]:
    return [
        (kind_name(group), group.block_size, [(layer.layer.name, layer.page_bytes) for layer in group.layers])
        for group in grouping.groups
    ]


def compare(layers: Sequence[Layer], options: EngineOptions, load: Load) -> None:
    try:
        ours = group_layers(layers, options)
    except ConfigError as error:
        with pytest.raises(reference.REFUSALS):
            pytest.fail(f"vLLM takes it: {reference.answer(layers, options, load, 1000)}; ours: {error}")
        return
    theirs = reference.answer(layers, options, load, 1000)
    assert told(ours) == theirs.groups
    assert ours.bytes_per_block == theirs.bytes_per_block
    assert ours.scheduler_block_size == theirs.scheduler_block_size
    holds = capacity(ours, ours.bytes_per_block * 1000 + 1, load)
    assert (holds.num_blocks, holds.blocks_per_request) == (1000, theirs.blocks_per_request)
    assert holds.concurrency == theirs.concurrency


quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(quick, max_examples=250)
@given(layers=mixes, options=engines, load=loads)
def test_layer_compact_caches(layers: list[Layer], options: EngineOptions, load: Load) -> None:
    compare(layers, options, load)


@settings(quick, max_examples=200)
@given(layers=st.one_of(mixes, stacks(dictated, most=6)), options=outermost, load=loads)
def test_block_outermost_caches(layers: list[Layer], options: EngineOptions, load: Load) -> None:
    compare(layers, options, load)
