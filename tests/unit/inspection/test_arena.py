"""The memory that is planned with: pages inside regions, regions apart, ranks that hold all heads between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError
from connector.plan.geometry import Geometry
from connector.plan.kinds import ChunkedLocal, Full, Kind, Mla, SlidingWindow, State
from hma_cli.inspection.arena import KvLayout, arena, division_for, moved_bytes
from hma_cli.models.caches import Attention
from hma_cli.models.grouping import EngineOptions, Grouping, group_layers
from tests.unit.inspection.samples import STATE, TOKEN, grouped, inspected, layers, mixtures
from tests.unit.models.variations import SERVED

BLOCKS = 7


def made(
    grouping: Grouping, *, kv_layout: KvLayout = KvLayout.PACKED, tp: int = 1, rank: int = 0, with_padding: bool = False
) -> Geometry:
    return arena(
        grouping,
        rank=rank,
        tp=tp,
        divide=division_for(grouping, kv_layout),
        num_blocks=BLOCKS,
        base=4096,
        with_padding=with_padding,
    )


def require_sound(geometry: Geometry) -> None:
    """No byte belongs to two regions, and no byte of a block to two pages of a group."""
    at = 0
    for region in sorted(geometry.regions, key=lambda region: region.base):
        assert region.base >= at
        at = region.base + region.extent
    for group in geometry.groups:
        used: dict[int, int] = {}
        for page in sorted(group.pages, key=lambda page: (page.region, page.offset)):
            assert page.offset >= used.get(page.region, 0)
            used[page.region] = page.offset + page.num_bytes
            assert used[page.region] <= geometry.regions[page.region].block_bytes


@given(mixtures, st.sampled_from(list(KvLayout)), st.sampled_from([None, "block_outermost"]), st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_pages_and_regions_lie_apart(kinds: list[Kind], kv_layout: KvLayout, layout: str | None, tp: int) -> None:
    assume(not (State() in kinds and kv_layout is KvLayout.SPLIT))
    try:
        grouping = grouped(kinds, tp=tp, layout=layout)
    except ConfigError:
        assume(False)
    for rank in range(tp):
        geometry = made(grouping, kv_layout=kv_layout, tp=tp, rank=rank)
        require_sound(geometry)
        for group, planned in zip(geometry.groups, grouping.groups, strict=True):
            assert group.block_bytes == sum(moved_bytes(layer) for layer in planned.layers)
            assert sum(region.block_bytes for region in geometry.regions) >= planned.block_bytes
        assert sum(region.block_bytes for region in geometry.regions) == grouping.bytes_per_block


@pytest.mark.parametrize("name", SERVED)
def test_pages_and_regions_of_published_models_lie_apart(name: str) -> None:
    found = inspected(name)
    for engine in (found.case.prefill, found.case.decode):
        for geometry in engine.ranks:
            require_sound(geometry)


def test_the_ith_layers_of_all_groups_share_a_region() -> None:
    """Three sliding layers in groups of two and one, and two full layers."""
    geometry = made(grouped([SlidingWindow(40)] * 3 + [Full()] * 2))
    assert [[page.region for page in group.pages] for group in geometry.groups] == [[0, 1], [0], [0, 1]]
    assert [region.block_bytes for region in geometry.regions] == [16 * TOKEN] * 2


def test_k_and_v_apart_take_two_regions_of_half_the_size() -> None:
    packed = made(grouped([Full()] * 2))
    split = made(grouped([Full()] * 2), kv_layout=KvLayout.SPLIT)
    assert [region.block_bytes for region in split.regions] == [16 * TOKEN // 2] * 4
    assert split.groups[0].block_bytes == packed.groups[0].block_bytes
    assert [page.region for page in split.groups[0].pages] == [0, 1, 2, 3]


def test_block_outermost_is_one_region_in_which_layers_follow_each_other() -> None:
    geometry = made(grouped([SlidingWindow(40)] * 2 + [Full()] * 2, layout="block_outermost"))
    (region,) = geometry.regions
    assert region.stride == 2 * 16 * TOKEN
    assert [page.offset for page in geometry.groups[0].pages] == [0, 16 * TOKEN]


def test_a_state_moves_without_its_padding() -> None:
    geometry = made(grouped([State(), Full()]))
    state = next(group for group in geometry.groups if group.kind == State())
    assert [page.num_bytes for page in state.pages] == [STATE]
    assert geometry.regions[0].stride == 16 * TOKEN


@pytest.mark.parametrize(
    ("kinds", "reach"),
    [
        ([SlidingWindow(40)] * 3 + [Full()] * 2, [2, 2, 2]),  # the short group reaches into the region the others share
        ([SlidingWindow(40)] * 4 + [Full()] * 5, [4, 5]),  # the fifth region is the full group's alone
        ([Full()] * 3, [3]),
        ([State()] * 3 + [Full()] * 2, [2, 2, 2]),
    ],
)
def test_short_groups_reach_as_far_as_the_in_tree_connector_lets_them(kinds: list[Kind], reach: list[int]) -> None:
    geometry = made(grouped(kinds), with_padding=True)
    assert [len(group.pages) for group in geometry.groups] == reach
    require_sound(geometry)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_all_ranks_together_hold_every_head(tp: int) -> None:
    """gemma-3-4b-it has four KV heads: on eight ranks two hold the same one."""
    found = inspected("google/gemma-3-4b-it", prefill_tp=tp, decode_tp=tp)
    for index in range(len(found.groups)):
        shares = [rank.groups[index].share for rank in found.case.decode.ranks]
        assert {share.total for share in shares} == {4}
        assert [part for share in shares for part in share.parts] == sorted(
            part for part in range(4) for _ in range(max(1, tp // 4))
        )


def test_latents_are_on_every_rank_and_states_divided() -> None:
    latent = inspected("deepseek-ai/DeepSeek-V3", prefill_tp=4, decode_tp=4)
    assert {rank.groups[0].share.total for rank in latent.case.decode.ranks} == {1}
    hybrid = inspected("Qwen/Qwen3-Next-80B-A3B-Instruct", prefill_tp=2, decode_tp=2)
    assert [rank.groups[0].share.first for rank in hybrid.case.decode.ranks] == [0, 1]


def test_k_and_v_apart_need_halves() -> None:
    with pytest.raises(ConfigError, match="keeps a state"):
        division_for(grouped([State(), Full()]), KvLayout.SPLIT)
    (layer,) = layers([Full()])
    narrow = replace(layer, cache=replace(layer.cache, head_size=192, head_size_v=128))
    with pytest.raises(ConfigError, match="keys of 192 and values of 128 elements"):
        division_for(group_layers([narrow], EngineOptions()), KvLayout.SPLIT)
    assert division_for(grouped([Mla()]), KvLayout.SPLIT)(grouped([Mla()]).groups[0].layers[0]) == (16 * 24,)
    whole = grouped([ChunkedLocal(64)]).groups[0].layers[0]
    assert isinstance(whole.layer.cache, Attention)
    assert division_for(grouped([ChunkedLocal(64)]), KvLayout.SPLIT)(whole) == (8 * TOKEN, 8 * TOKEN)
