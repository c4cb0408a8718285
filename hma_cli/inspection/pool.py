"""Block tables as vLLM's block pool hands them out: which ids a request gets decides how many descriptors merge.

Source: `free_blocks` and `get_new_blocks` in vLLM's `v1/core/block_pool.py`. Blocks are taken from the front of a
queue. A freed block that holds a cached prefix goes to its end, any other to its front; a request's blocks come back
last one first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from connector.errors import ConfigError
from connector.plan.build import NULL_BLOCK
from connector.plan.kinds import Kind, blocks_covering

PREFILL_STEP = 2048  # tokens that P computes in one step of the history
HISTORY = 24  # requests before ours in a steady pool
RUNNING = 4  # of them at a time
OUTPUT = 256  # tokens that D generates for each, at most
MAX_BLOCKS = 1 << 22  # in a pool whose every block is touched before the request: some seconds


class PoolState(StrEnum):
    """What the two pools have been through: nothing, a history of requests, or an arbitrary order."""

    FRESH = "fresh"
    STEADY = "steady"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Table:
    """What a pool must know of a group."""

    kind: Kind
    block_size: int

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


Tables = tuple[list[int], ...]


@dataclass(slots=True)
class Pool:
    """One engine's free queue. caching: whether full blocks stay in the prefix cache when they are freed.

    The queue is kept in three parts, so that a pool of millions of blocks costs nothing until they are used: blocks
    that came back to its front, those from `_unused` on that nobody has had yet, blocks that came back to its end.
    """

    num_blocks: int
    caching: bool
    _front: deque[int] = field(init=False, default_factory=deque)
    _unused: int = field(init=False, default=NULL_BLOCK + 1)
    _end: deque[int] = field(init=False, default_factory=deque)

    @property
    def num_free(self) -> int:
        return len(self._front) + self.num_blocks - self._unused + len(self._end)

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks; ConfigError when there are not as many."""
        if count > self.num_free:
            raise ConfigError(
                f"A pool of {self.num_blocks:,} blocks does not hold these requests.",
                remedy="Plan a shorter prompt (--prompt-tokens), or a fresh pool.",
            )
        taken = [self._front.popleft() for _ in range(min(count, len(self._front)))]
        fresh = min(count - len(taken), self.num_blocks - self._unused)
        taken += range(self._unused, self._unused + fresh)
        self._unused += fresh
        taken += [self._end.popleft() for _ in range(count - len(taken))]
        return taken

    def give_back(self, table: Sequence[int], num_full: int) -> None:
        """A request's blocks of one group, of which the first `num_full` are full."""
        owned = [(position, block) for position, block in enumerate(table) if block != NULL_BLOCK]
        cached = [block for position, block in reversed(owned) if self.caching and position < num_full]
        others = [block for position, block in reversed(owned) if not self.caching or position >= num_full]
        self._front.extendleft(reversed(others))
        self._end.extend(cached)

    def shuffle(self, seed: int) -> None:
        """Put the free blocks into an arbitrary order."""
        order = [*self._front, *range(self._unused, self.num_blocks), *self._end]
        random.Random(seed).shuffle(order)
        self._front, self._unused, self._end = deque(order), self.num_blocks, deque()


def pool_size(groups: Sequence[Table], num_tokens: int, state: PoolState) -> int:
    """Blocks in a pool that holds this request, and for a steady one those that run beside it.

    ConfigError where a history or an arbitrary order of so many blocks would take minutes.
    """
    longest = 2 * num_tokens + OUTPUT
    one = sum(group.blocks(longest) + 1 for group in groups)
    size = 1 + one * (RUNNING + 1 if state is PoolState.STEADY else 1)
    if state is not PoolState.FRESH and size > MAX_BLOCKS:
        raise ConfigError(
            f"A {state.value} pool for this prompt has {size:,} blocks, which takes too long to play through.",
            remedy="Plan a shorter prompt (--prompt-tokens), larger blocks (--block-size) or --pool fresh.",
        )
    return size


def prefilled(pool: Pool, groups: Sequence[Table], num_tokens: int) -> Tables:
    """P's tables after `num_tokens` tokens: blocks come step by step, and those that nothing reads any more go back."""
    tables: Tables = tuple([] for _ in groups)
    for start in range(0, num_tokens, PREFILL_STEP):
        _drop_dead(pool, groups, tables, start)
        _grow(pool, groups, tables, min(start + PREFILL_STEP, num_tokens))
    _drop_dead(pool, groups, tables, num_tokens)
    return tables


def received(pool: Pool, groups: Sequence[Table], num_tokens: int, cached_tokens: int) -> Tables:
    """D's tables for `num_tokens` tokens that come from P: dead positions are null from the start.

    The blocks of a cached prefix were taken before those of the rest. A last block that holds nothing live is there all
    the same, for the token that comes next; it is taken when all that loads has its blocks.
    """
    cached = tuple(_live_part(pool, group, cached_tokens, 0) for group in groups)
    tables: Tables = tuple(_live_part(pool, group, num_tokens, cached_tokens) for group in groups)
    for table, prefix in zip(tables, cached, strict=True):
        table[: len(prefix)] = prefix
    _grow(pool, groups, tables, num_tokens)
    return tables


def history(pool: Pool, groups: Sequence[Table], num_tokens: int, *, seed: int, decodes: bool) -> None:
    """Let requests of mixed lengths around `num_tokens` come and go, `RUNNING` at a time."""
    rng = random.Random(seed)
    running: deque[tuple[Tables, list[int]]] = deque()
    for _ in range(HISTORY):
        length = rng.randint(max(1, num_tokens // 4), max(1, 3 * num_tokens // 2))
        if len(running) == RUNNING:
            tables, (tokens,) = running.popleft()
            _end(pool, groups, tables, tokens)
        made = received(pool, groups, length, 0) if decodes else prefilled(pool, groups, length)
        running.append((made, [length]))
        if decodes:
            _decode(pool, groups, running, rng)
    for tables, (tokens,) in running:
        _end(pool, groups, tables, tokens)


def _decode(
    pool: Pool, groups: Sequence[Table], running: Sequence[tuple[Tables, list[int]]], rng: random.Random
) -> None:
    """All running requests generate some tokens in turn, so that their new blocks interleave."""
    for _ in range(OUTPUT // RUNNING // 16):
        for tables, tokens in running:
            tokens[0] += rng.randint(1, 16)
            _drop_dead(pool, groups, tables, tokens[0])
            _grow(pool, groups, tables, tokens[0])


def _grow(pool: Pool, groups: Sequence[Table], tables: Tables, num_tokens: int) -> None:
    for group, table in zip(groups, tables, strict=True):
        table.extend(pool.take(max(0, group.blocks(num_tokens) - len(table))))


def _drop_dead(pool: Pool, groups: Sequence[Table], tables: Tables, num_tokens: int) -> None:
    for group, table in zip(groups, tables, strict=True):
        dead = min(group.kind.live_range(num_tokens).start // group.block_size, len(table))
        first = dead  # what lies before has been dropped already: looking back keeps this linear in the prompt
        while first and table[first - 1] != NULL_BLOCK:
            first -= 1
        pool.give_back(table[first:dead], dead - first)
        table[first:dead] = [NULL_BLOCK] * (dead - first)


def _live_part(pool: Pool, group: Table, num_tokens: int, known_tokens: int) -> list[int]:
    """A table in which live positions past `known_tokens` are taken from the pool and all before them are null."""
    live = blocks_covering(group.kind.live_range(num_tokens), group.block_size)
    start = max(live.start, known_tokens // group.block_size)
    return [NULL_BLOCK] * start + pool.take(max(0, live.stop - start))


def _end(pool: Pool, groups: Sequence[Table], tables: Tables, num_tokens: int) -> None:
    for group, table in zip(groups, tables, strict=True):
        pool.give_back(table, num_tokens // group.block_size)
