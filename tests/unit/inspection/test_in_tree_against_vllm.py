"""The in-tree connector as it is modelled, beside its own code: the same descriptors for the same block lists."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from connector.plan.kinds import Full, Mla, SlidingWindow, State
from hma_cli.benchmarks.plan import _owners
from hma_cli.inspection.comparison import HandOver, block_tables, clipped
from hma_cli.inspection.engine import in_tree_engine
from hma_cli.inspection.inspect import Inspection, _case
from hma_cli.models.caches import Recurrent
from tests.unit.inspection.samples import inspected
from tests.unit.models.variations import SERVED

PROMPT = 3000


# Models that the in-tree connector does not move, for their states, or not in layer-compact blocks.
NOT_COMPARED = {
    "LiquidAI/LFM2-1.2B": "states",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "states",
    "deepseek-ai/DeepSeek-V4-Flash": "block_outermost",
    "deepseek-ai/DeepSeek-V4-Pro": "block_outermost",
}


@cache
def planned() -> dict[str, Inspection]:
    """Every model of the catalog that both vLLM and its connector take, whose blocks are layer-compact."""
    return {name: inspected(name, prompt_tokens=PROMPT) for name in SERVED if name not in NOT_COMPARED}


def theirs_clipped(found: Inspection, blocks: tuple[list[int], ...]) -> tuple[list[int], ...]:
    """Their own clip of a request's block lists."""
    groups = found.decode.groups
    scheduler: Any = SimpleNamespace(
        kv_cache_config=SimpleNamespace(select_transfer_block_ids=lambda ids: ids),
        _is_hma_required=any(group.kind not in (Full(), Mla()) for group in groups),
        # As its constructor computes them: cdiv(window, block) + 1; 0 where there is no window.
        blocks_per_sw=[
            -(-group.kind.window // group.block_size) + 1 if isinstance(group.kind, SlidingWindow) else 0
            for group in groups
        ],
        _ssm_spec_blocks=[0 if group.kind == State() else None for group in groups],
    )
    return tuple(map(list, NixlBaseConnectorScheduler.get_exchange_clipped_blocks(scheduler, blocks)))


def their_ids(found: Inspection, case: HandOver, blocks: tuple[list[int], ...]) -> list[int]:
    """Their own descriptor numbers for clipped lists, on a worker that has registered these regions."""
    geometry = found.case.decode.ranks[0]
    owners = _owners(geometry)
    states = [layer.layer.cache for group in found.decode.groups for layer in group.layers]
    recurrent = [cache for cache in states if isinstance(cache, Recurrent)]
    holding = {page.region for group in geometry.groups if group.kind == State() for page in group.pages}
    conv_parts = 1 if recurrent and recurrent[0].family == "mamba1" else 3
    worker: Any = SimpleNamespace(
        _has_mamba=bool(recurrent),
        _conv_decomp=SimpleNamespace(local_conv_offsets=[0] * conv_parts),
        _ssm_region_indices=sorted(holding),
        _scratch_region_indices=[],
        _ple_group_index=None,
        _group_spec_types=[MambaSpec if group.kind == State() else FullAttentionSpec for group in found.decode.groups],
        block_len_per_layer=[0] * len(owners),
        _transfer_layer_group_ids=[],
        num_regions=len(owners),
        region_group_ids=owners,
        _uses_region_group_mapping=len(set(owners)) > 1,
    )
    return list(
        NixlBaseConnectorWorker._compute_desc_ids(
            worker,
            block_ids=blocks,
            dst_num_blocks=case.decode.num_blocks,
            block_size_ratio=None,
            physical_blocks_per_logical=1,
        )
    )


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_what_is_not_compared_is_refused_or_laid_out_otherwise(name: str) -> None:
    found = inspected(name, prompt_tokens=PROMPT)
    if NOT_COMPARED[name] == "states":
        assert "does not move states" in found.reasons["in_tree"]
    else:
        assert found.decode.layout == NOT_COMPARED[name]


@pytest.mark.parametrize("name", [name for name in SERVED if name not in NOT_COMPARED])
def test_as_many_descriptors_as_its_own_code_numbers(name: str) -> None:
    found = planned()[name]
    case = _case(found.request, found.prefill, found.decode, in_tree_engine)
    _, tables = block_tables(case, PROMPT)
    blocks = theirs_clipped(found, tables)
    assert blocks == tuple(
        list(clipped(ids, group.kind, group.block_size)) for ids, group in zip(tables, found.decode.groups, strict=True)
    )
    numbers = their_ids(found, case, blocks)
    total = found.totals["in_tree"]
    assert total is not None
    assert total.descriptors == len(numbers)


def test_the_comparison_covers_every_shape_of_model() -> None:
    """One kind, windows beside full attention in even and uneven groups, chunks, latents, states of three families."""
    groups = {name: one.decode.groups for name, one in planned().items()}
    kinds = {frozenset(group.kind.name for group in found) for found in groups.values()}
    assert {
        frozenset({"full"}),
        frozenset({"sliding_window", "full"}),
        frozenset({"chunked_local", "full"}),
        frozenset({"mla"}),
        frozenset({"state", "full"}),
    } <= kinds
    assert any(len({len(group.layers) for group in found}) > 1 for found in groups.values())
    families = {
        layer.layer.cache.family
        for found in groups.values()
        for group in found
        for layer in group.layers
        if isinstance(layer.layer.cache, Recurrent)
    }
    assert families == {"mamba1", "mamba2", "gdn"}
