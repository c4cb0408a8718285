"""Tensor parallelism 1 and 2 against each other, and blocks of another size, through real engines.

Two KV heads, so that two ranks hold one each: a rank of D reads its slice of P's pages, or its two heads from P's two
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import live_bytes, make_prompt, same_answer, stats_delta
from tests.engines import Engine, engine_args, engines, hand_over
from tests.models import tiny_gemma3

BLOCK = 32
LENGTHS = (2, 31, 33, 64, 95, 96, 127, 223, 300, 511)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """one, two: by number of ranks. large: one rank, blocks of 64 tokens."""

    def args(ranks: int = 1, block: int = BLOCK) -> dict[str, Any]:
        made = engine_args(tiny_gemma3(kv_heads=2), "hma", block_size=block)
        return made | ({"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"} if ranks > 1 else {})

    specs = {"one": args(), "two": args(ranks=2), "large": args(block=64)}
    with engines(specs, tmp_path_factory.mktemp("parallel")) as made:
        yield made


@pytest.mark.parametrize(("p", "d"), [("one", "two"), ("two", "one")])
def test_each_rank_reads_its_heads(started: dict[str, Engine], p: str, d: str) -> None:
    """C6: both directions, one claim for all ranks, a release after all of them."""
    prompts = {str(n): make_prompt(n, seed=len(p + d) + (p == "one")) for n in LENGTHS}
    wanted = started["one"].generate([{"id": f"w-{name}", "tokens": t} for name, t in prompts.items()])
    hand_over(started[p], started[d], {"first": make_prompt(40)})  # whoever meets for the first time connects
    before = started[d].status()
    for name, tokens in prompts.items():
        _, got = hand_over(started[p], started[d], {name: tokens})
        assert same_answer(got[name], wanted[f"w-{name}"]), name
    moved = stats_delta(started[d], before)
    assert moved["transfers"] == len(prompts)
    assert moved["bytes_moved"] == sum(live_bytes(started["one"], len(tokens)) for tokens in prompts.values())
    assert moved["descriptors_posted"] == moved["runs_planned"]
    for engine in (started[p], started[d]):
        engine.wait_free()


def test_blocks_that_cannot_be_cut_are_refused_by_name(started: dict[str, Engine]) -> None:
    """W11: vLLM's CPU backend keeps each head of a block in an order of its own."""
    prompt = make_prompt(150, seed=9)
    wanted = started["one"].generate([{"id": "w", "tokens": prompt}])["w"]
    before = started["large"].status()
    _, got = hand_over(started["one"], started["large"], {"cut": prompt})
    assert same_answer(got["cut"], wanted)
    moved = stats_delta(started["large"], before)
    assert moved.get("bytes_moved", 0) == 0
    assert moved["fallbacks"] == {"incompatible|recomputed": 1}
    assert "cannot be cut between tokens" in started["large"].log.read_text()
