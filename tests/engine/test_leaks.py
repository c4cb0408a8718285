"""Memory of both engines over thousands of hand-overs (L3)."""

from __future__ import annotations

import numpy as np

from tests.engine.conftest import House, make_prompt
from tests.engines import hand_over

REQUESTS, AT_ONCE, WARM = 2400, 24, 400
MIB_PER_1000 = 1.0


def test_two_thousand_short_requests_do_not_grow_the_engines(house: House) -> None:
    p, d = house["p_plain"], house["d_plain"]
    before = d.status()["stats"].get("transfers", 0)
    samples = []
    for start in range(0, REQUESTS, AT_ONCE):
        prompts = {f"l3-{start + n}": make_prompt(3 + n, seed=start) for n in range(AT_ONCE)}
        hand_over(p, d, prompts, params={"max_tokens": 1, "logprobs": None})
        if start >= WARM:
            samples.append((start, p.status()["rss_mib"], d.status()["rss_mib"]))
    for engine in (p, d):
        engine.wait_free()
    table = np.array(samples)
    grown = {name: 1000 * float(np.polyfit(table[:, 0], table[:, 1 + i], 1)[0]) for i, name in enumerate("PD")}
    assert d.status()["stats"]["transfers"] - before == REQUESTS
    assert {name: slope for name, slope in grown.items() if slope >= MIB_PER_1000} == {}
