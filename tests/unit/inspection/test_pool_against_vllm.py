"""Our pool and tables beside vLLM's own BlockPool and KVCacheManager, for random histories."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from connector.plan.kinds import ChunkedLocal, Full, Kind, SlidingWindow
from hma_cli.inspection import pool as module
from hma_cli.inspection.pool import Pool, Table, prefilled, received

NUM_BLOCKS = 400
BLOCK = 16


class Theirs:
    """vLLM's pool, asked as a request's manager asks it."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, caching, BLOCK)
        self.hashes = 0

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def give_back(self, table: Sequence[int], num_full: int) -> None:
        blocks = [self.pool.blocks[index] for index in table]
        for block in blocks[:num_full]:
            if self.pool.enable_caching and not block.is_null:
                self.hashes += 1  # as `cache_full_blocks` marks a full block
                block.set_block_hash(make_block_hash_with_group_id(self.hashes.to_bytes(8, "big"), 0), BLOCK)
        self.pool.free_blocks(reversed(blocks))


@given(st.booleans(), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=60), st.randoms())
@settings(deadline=None)
def test_ids_come_in_the_order_of_vllms_pool(caching: bool, steps: list[tuple[int, int]], rng: Random) -> None:
    ours, theirs = Pool(60, caching), Theirs(60, caching)
    running: list[list[int]] = []
    for count, full in steps:
        if count <= ours.num_free:
            taken = ours.take(count)
            assert taken == theirs.take(count)
            running.append(taken)
        if running and full % 3:
            table = running.pop(rng.randrange(len(running)))
            table = [block if rng.random() > 0.2 else 0 for block in table]
            for pool in (ours, theirs):
                pool.give_back(table, min(full, len(table)))
        assert ours.num_free == theirs.pool.get_num_free_blocks()
    rest = theirs.pool.get_num_free_blocks()
    assert ours.num_free == rest
    assert ours.take(rest) == theirs.take(rest)


def spec(kind: Kind) -> KVCacheSpec:
    common: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
    match kind:
        case SlidingWindow(window):
            return SlidingWindowSpec(sliding_window=window, **common)
        case ChunkedLocal(chunk):
            return ChunkedLocalAttentionSpec(attention_chunk_size=chunk, **common)
    return FullAttentionSpec(**common)


def manager(kinds: Sequence[Kind], caching: bool) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec(kind)) for index, kind in enumerate(kinds)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=4096,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_caching=caching,
    )


def request(name: str, tokens: Sequence[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


# A window of 1, the query alone, is left out: of such a group vLLM keeps nothing in its prefix cache.
kinds = st.lists(
    st.one_of(
        st.just(Full()), st.builds(SlidingWindow, st.integers(2, 120)), st.builds(ChunkedLocal, st.integers(16, 120))
    ),
    min_size=1,
    max_size=3,
)


def computed(manager: KVCacheManager, prompt: Request, step: int) -> tuple[list[int], ...]:
    """The request's tables after a prefill in steps, as the scheduler does it."""
    while prompt.num_computed_tokens < prompt.num_tokens:
        count = min(step, prompt.num_tokens - prompt.num_computed_tokens)
        assert manager.allocate_slots(prompt, count) is not None
        prompt.num_computed_tokens += count
    manager.remove_skipped_blocks(prompt.request_id, prompt.num_computed_tokens)
    return tuple(map(list, manager.get_block_ids(prompt.request_id)))


@given(kinds, st.lists(st.integers(1, 500), min_size=1, max_size=4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_p_gets_the_tables_that_vllms_manager_gives_it(kinds: list[Kind], prompts: list[int], caching: bool) -> None:
    """Prompts one after another, each freed before the next: fresh ids first, then used ones."""
    init_none_hash(sha256)
    theirs, ours = manager(kinds, caching), Pool(NUM_BLOCKS, caching)
    groups = [Table(kind, BLOCK) for kind in kinds]
    step = 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PREFILL_STEP", step)
        for number, length in enumerate(prompts):
            prompt = request(str(number), range(1000 * number, 1000 * number + length))
            expected = computed(theirs, prompt, step)
            found = prefilled(ours, groups, length)
            assert found == expected
            theirs.free(prompt)
            module._end(ours, groups, found, length)


@given(kinds, st.integers(2, 500))
@settings(max_examples=30, deadline=None)
def test_d_gets_the_tables_that_vllms_manager_gives_it(kinds: list[Kind], tokens: int) -> None:
    theirs = manager(kinds, caching=False)
    prompt = request("0", range(tokens))
    made = theirs.allocate_slots(prompt, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True)
    assert made is not None
    expected = tuple(map(list, theirs.get_block_ids("0")))
    assert received(Pool(NUM_BLOCKS, caching=False), [Table(kind, BLOCK) for kind in kinds], tokens, 0) == expected
