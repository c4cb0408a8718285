"""Block tables as pools hand them out: whose ids, in which order, from fresh, used and shuffled pools."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import ConfigError
from connector.plan.build import NULL_BLOCK, live_blocks
from connector.plan.kinds import ChunkedLocal, Full, Kind, SlidingWindow, State
from hma_cli.inspection import pool as module
from hma_cli.inspection.pool import (
    MAX_BLOCKS,
    Pool,
    PoolState,
    Table,
    history,
    pool_size,
    prefilled,
    received,
)

kinds = st.one_of(
    st.sampled_from([Full(), State()]),
    st.builds(SlidingWindow, st.integers(1, 200)),
    st.builds(ChunkedLocal, st.integers(1, 200)),
)
groups = st.lists(st.builds(Table, kinds, st.sampled_from([4, 16, 32])), min_size=1, max_size=4)


def owned(tables: module.Tables) -> list[int]:
    return [block for table in tables for block in table if block != NULL_BLOCK]


def test_a_fresh_pool_hands_out_ascending_ids_and_never_the_null_block() -> None:
    pool = Pool(6, caching=False)
    assert pool.take(2) + pool.take(3) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_more_blocks_than_there_are_is_refused_and_takes_none() -> None:
    pool = Pool(4, caching=False)
    with pytest.raises(ConfigError, match="A pool of 4 blocks does not hold"):
        pool.take(4)
    assert pool.take(3) == [1, 2, 3]


def test_freed_blocks_come_back_first_in_the_order_of_their_positions_reversed() -> None:
    """vLLM frees a request's blocks last one first and puts those at the front of the queue, as one batch."""
    pool = Pool(20, caching=False)
    table = pool.take(4)
    pool.give_back(table, 4)
    assert pool.take(6) == [4, 3, 2, 1, 5, 6]


def test_full_blocks_stay_cached_and_go_to_the_end_the_last_one_is_not_full() -> None:
    pool = Pool(8, caching=True)
    table = pool.take(4)
    pool.give_back(table, 3)
    assert pool.take(7) == [4, 5, 6, 7, 3, 2, 1]


def test_null_positions_are_not_given_back() -> None:
    pool = Pool(8, caching=False)
    pool.take(7)
    pool.give_back([0, 0, 3, 4], 4)
    assert pool.take(2) == [4, 3]
    assert pool.num_free == 0


@given(st.booleans(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40), st.randoms())
def test_no_block_has_two_owners(caching: bool, steps: list[tuple[int, int]], rng: Random) -> None:
    pool, running = Pool(40, caching), []
    for count, full in steps:
        if count <= pool.num_free:
            running.append(pool.take(count))
        if running and full % 2:
            table = running.pop(rng.randrange(len(running)))
            pool.give_back(table, min(full, len(table)))
        ids = [block for table in running for block in table]
        assert len(ids) == len(set(ids)) == 39 - pool.num_free
        assert NULL_BLOCK not in ids


@pytest.mark.parametrize("caching", [False, True])
def test_a_shuffle_keeps_the_free_blocks_and_is_the_seeds_alone(caching: bool) -> None:
    def shuffled(seed: int) -> list[int]:
        pool = Pool(50, caching)
        pool.give_back(pool.take(5)[:3], 2)
        pool.shuffle(seed)
        return pool.take(pool.num_free)

    assert sorted(shuffled(1)) == [1, 2, 3, *range(6, 50)]
    assert shuffled(1) == shuffled(1) != shuffled(2)


@given(groups, st.integers(1, 900), st.booleans())
def test_what_is_read_is_owned_and_what_is_dead_is_null(tables: list[Table], tokens: int, caching: bool) -> None:
    made: list[Callable[[Pool], module.Tables]] = [
        lambda pool: prefilled(pool, tables, tokens),
        lambda pool: received(pool, tables, tokens, 0),
    ]
    for make in made:
        pool = Pool(pool_size(tables, tokens, PoolState.FRESH), caching)
        found = make(pool)
        assert len(set(owned(found))) == len(owned(found))
        for table, ids in zip(tables, found, strict=True):
            assert len(ids) == table.blocks(tokens)
            dead = table.kind.live_range(tokens).start // table.block_size
            assert [block == NULL_BLOCK for block in ids] == [position < dead for position in range(len(ids))]
            assert live_blocks(table.kind, table.block_size, ids, tokens) is not None


def test_prefill_takes_blocks_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, steps of 32 tokens, blocks of 16: each step takes two blocks of one group, then two of the other."""
    monkeypatch.setattr(module, "PREFILL_STEP", 32)
    found = prefilled(Pool(100, caching=False), [Table(Full(), 16), Table(Full(), 16)], 90)
    assert found == ([1, 2, 5, 6, 9, 10], [3, 4, 7, 8, 11, 12])


def test_blocks_behind_the_window_are_used_again_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Window 17: after 32 tokens, position 32 reads 16 and later, so block 1 goes back and is the next one taken."""
    monkeypatch.setattr(module, "PREFILL_STEP", 32)
    found = prefilled(Pool(100, caching=False), [Table(SlidingWindow(17), 16)], 64)
    assert found == ([0, 0, 0, 3],)
    assert prefilled(Pool(100, caching=False), [Table(SlidingWindow(17), 16)], 63) == ([0, 0, 1, 3],)


def test_what_d_has_cached_was_taken_before_the_rest() -> None:
    found = received(Pool(100, caching=True), [Table(Full(), 16), Table(SlidingWindow(40), 16)], 80, 32)
    assert found == ([1, 2, 5, 6, 7], [3, 4, 8, 9, 10])


@pytest.mark.parametrize("decodes", [False, True])
@given(tables=groups, tokens=st.integers(1, 300), caching=st.booleans(), seed=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_after_a_history_every_block_is_free_again_in_another_order(
    decodes: bool, tables: list[Table], tokens: int, caching: bool, seed: int
) -> None:
    def free() -> list[int]:
        pool = Pool(pool_size(tables, tokens, PoolState.STEADY), caching)
        history(pool, tables, tokens, seed=seed, decodes=decodes)
        return pool.take(pool.num_free)

    found = free()
    assert sorted(found) == list(range(1, len(found) + 1))
    assert found == free()


@pytest.mark.parametrize("state", list(PoolState))
@given(tables=groups, tokens=st.integers(1, 300), caching=st.booleans(), decodes=st.booleans(), seed=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_a_pool_is_large_enough_for_what_is_asked_of_it(
    state: PoolState, tables: list[Table], tokens: int, caching: bool, decodes: bool, seed: int
) -> None:
    pool = Pool(pool_size(tables, tokens, state), caching)
    if state is PoolState.STEADY:
        history(pool, tables, tokens, seed=seed, decodes=decodes)
    elif state is PoolState.RANDOM:
        pool.shuffle(seed)
    prefilled(pool, tables, tokens)


@pytest.mark.parametrize("state", [PoolState.STEADY, PoolState.RANDOM])
def test_pools_too_large_to_play_through_are_refused(state: PoolState) -> None:
    tables: list[Table] = [Table(Full(), 16)]
    with pytest.raises(ConfigError, match="takes too long") as caught:
        pool_size(tables, 16 * MAX_BLOCKS, state)
    assert "--pool fresh" in caught.value.remedy
    assert pool_size(tables, 16 * MAX_BLOCKS, PoolState.FRESH) > MAX_BLOCKS


def test_a_long_prompt_costs_no_more_than_its_length() -> None:
    """Tables of 625,000 positions with 4,882 steps: what was dropped once is not looked at again."""
    kind: Kind = SlidingWindow(1024)
    pool = Pool(2_000_000, caching=False)
    (table,) = prefilled(pool, [Table(kind, 16)], 10_000_000)
    assert len(table) == 625_000
    assert sum(block != NULL_BLOCK for block in table) == 64
