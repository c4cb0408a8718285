"""The four plans of a hand-over, against oracles that know tokens and addresses, and the reference result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError
from connector.plan.kinds import Full, Kind, Mla, SlidingWindow, State
from hma_cli.inspection.arena import KvLayout
from hma_cli.inspection.comparison import Amount, HandOver, Plan, in_tree, lower_bound, ours, without_hma
from hma_cli.inspection.engine import in_tree_engine
from hma_cli.inspection.pool import PoolState
from hma_cli.models.grouping import Grouping
from tests.unit.inspection.samples import LATENT, STATE, TOKEN, grouped, hand_over, inspected, mixtures, still_read

WINDOW_BLOCKS = 16  # of 64 tokens: gemma-3-4b-it's window of 1,024, of which the next token reads 1,023
PAGE = 64 * 4 * (256 + 256) * 2  # 64 tokens, 4 KV heads, K and V of 256 elements of 2 bytes


@pytest.mark.parametrize(("kv_layout", "halves"), [(KvLayout.SPLIT, 2), (KvLayout.PACKED, 1)])
def test_the_reference_result(kv_layout: KvLayout, halves: int) -> None:
    """gemma-3-4b-it, 4,032 prompt tokens in 63 blocks of 64: 29 sliding layers in six groups, 5 full ones."""
    found = inspected(
        "google/gemma-3-4b-it",
        prompt_tokens=4032,
        prefill_block_size=64,
        decode_block_size=64,
        kv_layout=kv_layout,
    )
    no_hma, in_tree, hma, least = (found.totals[name] for name in ("no_hma", "in_tree", "hma", "lower_bound"))
    assert no_hma is not None and in_tree is not None and hma is not None and least is not None
    pages = {
        "no_hma": 63 * 34,
        "in_tree": (6 * (WINDOW_BLOCKS + 1) + 63) * 5,  # one block more of each window, and five layers of each group
        "hma": WINDOW_BLOCKS * 29 + 63 * 5,
    }
    assert pages == {"no_hma": 2142, "in_tree": 825, "hma": 779}
    assert {name: found.totals[name].descriptors for name in pages} == {  # type: ignore[union-attr]
        name: halves * count for name, count in pages.items()
    }
    assert {name: found.totals[name].num_bytes for name in pages} == {  # type: ignore[union-attr]
        name: count * PAGE for name, count in pages.items()
    }
    assert least.descriptors == hma.descriptors
    assert least.num_bytes == (1023 * 29 + 4031 * 5) * PAGE // 64


@dataclass(frozen=True)
class Case:
    """A hand-over with what it was made of."""

    kinds: Sequence[Kind]
    prefill: Grouping
    decode: Grouping
    case: HandOver
    in_tree_case: HandOver
    tp: tuple[int, int]


@st.composite
def cases(draw: st.DrawFn, *, alike: bool = False) -> Case:
    """alike: both sides with one block size and one number of ranks."""
    kinds = draw(mixtures)
    states, latents = State() in kinds, Mla() in kinds
    theirs = draw(st.sampled_from([16, 32, 48]))
    mine = theirs if alike or states else draw(st.sampled_from([theirs, 16]))
    tp = draw(st.sampled_from([1, 2])) if not latents else 1
    decode_tp = tp if alike or states or latents else draw(st.sampled_from([1, 2]))
    options: dict[str, Any] = {"prefix_caching": draw(st.booleans()), "max_model_len": 1024}
    if draw(st.booleans()):
        options["layout"] = "block_outermost"
    try:
        prefill = grouped(kinds, tp=tp, **options | {"block_size": theirs})
        decode = grouped(kinds, tp=decode_tp, **options | {"block_size": mine})
    except ConfigError:
        assume(False)
    assume(
        [group.layers[0].layer.index for group in prefill.groups] == [g.layers[0].layer.index for g in decode.groups]
    )
    prompt = draw(st.one_of(st.integers(1, 600), st.integers(1, 12).map(lambda blocks: 16 * blocks)))
    step = decode.scheduler_block_size
    cached = draw(st.integers(0, (prompt - 1) // step)) * step
    kv_layout = draw(st.sampled_from(list(KvLayout))) if not states else KvLayout.PACKED
    pool, seed = draw(st.sampled_from(list(PoolState))), draw(st.integers(0, 9))

    def made(**engine: Any) -> HandOver:
        return hand_over(
            prefill,
            decode,
            prompt,
            cached_tokens=cached,
            prefill_tp=tp,
            decode_tp=decode_tp,
            kv_layout=kv_layout,
            pool=pool,
            seed=seed,
            **engine,
        )

    return Case(kinds, prefill, decode, made(), made(make=in_tree_engine), (tp, decode_tp))


def planned(case: Case) -> Plan:
    return ours(case.case)


def moving(case: Case, kind: Kind, block_size: int) -> set[int]:
    """Numbers of the blocks of `block_size` tokens that hold something that is read and that D does not have."""
    live = still_read(kind, case.case.handed_tokens)
    return {token // block_size for token in live if token >= case.case.cached_tokens}


def token_bytes(kind: Kind) -> int:
    """Of one layer on all ranks of D together."""
    return LATENT if kind == Mla() else TOKEN


quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@given(cases())
@quick
def test_what_moves_is_the_least_whole_blocks_that_hold_what_is_read(case: Case) -> None:
    plan = planned(case)
    for theirs, mine, found in zip(case.prefill.groups, case.decode.groups, plan.groups, strict=True):
        unit = min(mine.block_size, theirs.block_size)
        blocks = moving(case, mine.kind, unit)
        size = STATE * case.tp[1] if mine.kind == State() else unit * token_bytes(mine.kind)
        assert found.amount.num_bytes == len(blocks) * size * len(mine.layers), mine.kind
        assert len(set(found.pairs.local.tolist())) == len(moving(case, mine.kind, mine.block_size))


@given(cases())
@quick
def test_the_lower_bound_is_the_bytes_of_what_is_read(case: Case) -> None:
    plan = planned(case)
    least = lower_bound(case.case, plan)
    expected = 0
    for group in case.decode.groups:
        tokens = [t for t in still_read(group.kind, case.case.handed_tokens) if t >= case.case.cached_tokens]
        if group.kind == State():
            expected += bool(tokens) * STATE * case.tp[1] * len(group.layers)
        else:
            expected += len(tokens) * token_bytes(group.kind) * len(group.layers)
    assert least.num_bytes == expected <= plan.total.num_bytes
    assert least.descriptors == plan.total.descriptors
    assert least.runs <= plan.total.runs


@given(cases())
@quick
def test_the_groups_add_up_to_the_total(case: Case) -> None:
    plan = planned(case)
    assert sum(group.amount.num_bytes for group in plan.groups) == plan.total.num_bytes
    assert sum(group.amount.descriptors for group in plan.groups) == plan.total.descriptors
    # Blocks of two groups may continue each other, so together there are no more runs than one by one.
    assert plan.total.runs <= sum(group.amount.runs for group in plan.groups)


@given(cases(alike=True))
@quick
def test_descriptors_are_pages_and_runs_are_stretches_of_memory(case: Case) -> None:
    plan = planned(case)
    descriptors = runs = 0
    for theirs, mine in zip(case.case.prefill.ranks, case.case.decode.ranks, strict=True):
        strips: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for group, remote, local in zip(plan.groups, theirs.groups, mine.groups, strict=True):
            pairs = list(zip(group.pairs.remote.tolist(), group.pairs.local.tolist(), strict=True))
            descriptors += len(pairs) * len(local.pages)
            assert [(page.offset, page.num_bytes) for page in remote.pages] == [
                (page.offset, page.num_bytes) for page in local.pages
            ]
            for region, offset, size in side_by_side([(p.region, p.offset, p.num_bytes) for p in local.pages]):
                there, here = theirs.regions[region], mine.regions[region]
                strips.setdefault((region, offset, size), []).extend(
                    (there.base + ids[0] * there.stride + offset, here.base + ids[1] * here.stride + offset)
                    for ids in pairs
                )
        for (_, _, size), addresses in strips.items():
            known = set(addresses)
            runs += sum((there - size, here - size) not in known for there, here in addresses)
    assert (plan.total.descriptors, plan.total.runs) == (descriptors, runs)


def side_by_side(pages: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(region, offset, bytes) of pages, neighbours joined into one."""
    joined: list[tuple[int, int, int]] = []
    for region, offset, size in pages:
        if joined and joined[-1][0] == region and sum(joined[-1][1:]) == offset:
            joined[-1] = (region, joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((region, offset, size))
    return joined


@given(cases(alike=True))
@quick
def test_each_plan_moves_no_more_than_the_next(case: Case) -> None:
    plan, theirs = planned(case), in_tree(case.in_tree_case)
    assert plan.total.num_bytes <= theirs.num_bytes
    if State() in case.kinds:
        return
    everything = sum(len(group.layers) for group in case.decode.groups)
    blocks = -(-case.case.prompt_tokens // case.decode.groups[0].block_size)
    blocks -= case.case.cached_tokens // case.decode.groups[0].block_size
    size = case.decode.groups[0].block_size * token_bytes(case.kinds[0])
    lengths = {len(group.layers) for group in case.decode.groups}
    if len(lengths) == 1 or case.decode.layout == "block_outermost":  # no short group reaches beyond its layers
        assert theirs.num_bytes <= everything * blocks * size


@given(cases(alike=True))
@quick
def test_without_hma_everything_that_is_not_cached_moves(case: Case) -> None:
    assume(State() not in case.kinds)
    try:
        full = [
            grouped(case.kinds, tp=tp, block_size=g.groups[0].block_size, hma=False)
            for tp, g in ((case.tp[0], case.prefill), (case.tp[1], case.decode))
        ]
    except ConfigError:
        assume(False)
    found = without_hma(
        hand_over(
            *full,
            case.case.prompt_tokens,
            cached_tokens=case.case.cached_tokens,
            prefill_tp=case.tp[0],
            decode_tp=case.tp[1],
        )
    )
    size = full[1].groups[0].block_size
    blocks = -(-case.case.prompt_tokens // size) - case.case.cached_tokens // size
    assert found.num_bytes == blocks * size * token_bytes(case.kinds[0]) * len(case.kinds)
    assert found.descriptors == blocks * len(case.kinds) * case.tp[1]


def test_a_prompt_of_one_token_moves_nothing() -> None:
    for kinds in ([Full(), SlidingWindow(40)], [Full(), State()], [Mla()]):
        grouping = grouped(kinds)
        plan = ours(hand_over(grouping, grouping, 1))
        assert plan.total == Amount(0, 0, 0)
        assert all(not group.live for group in plan.groups)


@pytest.mark.parametrize(
    ("prompt", "cached", "told", "remedy"),
    [
        (0, 0, "at least one token", ""),
        (10, 10, "the last one is always computed", "--cached-tokens from 0 to 0"),
        (100, 200, "200 of 100 prompt tokens", "--cached-tokens from 0 to 96"),
        (100, -16, "-16 of 100", "--cached-tokens from 0 to 96"),
        (100, 17, "not a whole number of D's blocks of 16", "--cached-tokens 16 or 32"),
        (100, 97, "not a whole number of D's blocks of 16", "--cached-tokens 96."),
    ],
)
def test_requests_that_cannot_be(prompt: int, cached: int, told: str, remedy: str) -> None:
    grouping = grouped([Full(), SlidingWindow(40)])
    with pytest.raises(ConfigError, match=told) as caught:
        ours(hand_over(grouping, grouping, prompt, cached_tokens=cached))
    assert remedy in caught.value.remedy


def test_the_in_tree_connector_is_modelled_with_one_block_size_only() -> None:
    sides = (grouped([Full()], block_size=16), grouped([Full()], block_size=32))
    with pytest.raises(ConfigError, match="different block sizes"):
        in_tree(hand_over(*sides, 100, make=in_tree_engine))
