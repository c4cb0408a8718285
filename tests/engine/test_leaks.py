"""Memory of both engines over thousands of hand-overs (L3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.conftest import make_prompt
from tests.engines import Engine, engine_args, engines, hand_over
from tests.models import tiny_gemma3

REQUESTS, AT_ONCE = 4800, 24
# D's heap takes a few steps of megabytes among the first two thousand requests, and none in the eight thousand after.
WARM = 2400
MIB_PER_1000 = 1.0
BLOCKS = 400


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """P and D whose caches have been filled once: memory of blocks that were never used is not resident yet."""
    args = engine_args(tiny_gemma3(), "hma", num_gpu_blocks_override=BLOCKS)
    with engines({"P": args, "D": args}, tmp_path_factory.mktemp("leaks")) as started:
        for engine in started.values():
            engine.generate([{"id": f"fill-{n}", "tokens": make_prompt(900, seed=n)} for n in range(12)])
            engine.wait_free()
        yield started["P"], started["D"]


def test_two_thousand_short_requests_do_not_grow_the_engines(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    samples = []
    for start in range(0, REQUESTS, AT_ONCE):
        prompts = {f"l3-{start + n}": make_prompt(3 + n, seed=start) for n in range(AT_ONCE)}
        hand_over(p, d, prompts, params={"max_tokens": 1, "logprobs": None})
        if start >= WARM:
            samples.append((start, p.status()["rss_mib"], d.status()["rss_mib"]))
    for engine in pair:
        engine.wait_free()
    table = np.array(samples)
    grown = {name: 1000 * float(np.polyfit(table[:, 0], table[:, 1 + i], 1)[0]) for i, name in enumerate("PD")}
    assert d.status()["stats"]["transfers"] == REQUESTS
    assert {name: slope for name, slope in grown.items() if slope >= MIB_PER_1000} == {}
