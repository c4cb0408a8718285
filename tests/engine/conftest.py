"""Real engines for the tests of this folder: two prefill engines, three decode engines, one reference.

They are started once, and end with the folder: the end-to-end tests need the memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines import Engine, engine_args, engines
from tests.models import GEMMA3_VOCAB, GEMMA3_WINDOW, tiny_gemma3

BLOCK = 32
WINDOW = GEMMA3_WINDOW
LEASE = 6.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@dataclass
class House:
    """Engines by name: p_plain, p_cached (prefix caching, prefill in chunks of 64), d_plain, d_cached, d_failing (a
    refused or failed hand-over fails the request instead of recomputing it), reference (without a connector)."""

    engines: dict[str, Engine]

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    model = tiny_gemma3()
    chunked = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True}
    transfer = engine_args(model, "hma")["kv_transfer_config"]
    transfer["kv_connector_extra_config"] = {"lease_seconds": LEASE, "claim_timeout": 3.0}
    ours: dict[str, Any] = {"block_size": BLOCK, "kv_transfer_config": transfer}
    failing = {**ours, "kv_transfer_config": {**transfer, "kv_load_failure_policy": "fail"}}
    specs = {
        "p_plain": engine_args(model, "hma", **ours),
        "p_cached": engine_args(model, "hma", **ours, enable_prefix_caching=True, **chunked),
        "d_plain": engine_args(model, "hma", **ours),
        "d_cached": engine_args(model, "hma", **ours, enable_prefix_caching=True),
        "d_failing": engine_args(model, "hma", **failing),
        "reference": engine_args(model, None, block_size=BLOCK),
    }
    with engines(specs, tmp_path_factory.mktemp("engines")) as started:
        yield House(started)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(4, GEMMA3_VOCAB) for _ in range(length)]


class Reference:
    """Answers of the one engine without a connector, each computed once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[tuple[int, ...], Any] = {}

    def __call__(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[Any]:
        missing = {tuple(p) for p in prompts} - self._answers.keys()
        requests = [{"id": f"ref-{i}", "tokens": list(p), "params": params} for i, p in enumerate(missing)]
        if requests:
            results = self._engine.generate(requests)
            self._answers |= {tuple(r["tokens"]): results[r["id"]] for r in requests}
        return [self._answers[tuple(p)] for p in prompts]


@pytest.fixture(scope="package")
def reference(house: House) -> Reference:
    return Reference(house["reference"])


def same_answer(got: Any, wanted: Any) -> bool:
    """Token ids are equal, and log-probabilities to three decimals."""
    if got["tokens"] != wanted["tokens"] or len(got["logprobs"]) != len(wanted["logprobs"]):
        return False
    return all(abs(a - b) < 5e-4 for a, b in zip(got["logprobs"], wanted["logprobs"], strict=True))


def live_bytes(engine: Engine, prompt_tokens: int, cached_blocks: int = 0) -> int:
    """Bytes of exactly the live pages of a prompt, from vLLM's own groups and a token-level oracle.

    The last token is computed by D. A query at position q reads positions max(0, q - window + 1) … q - 1 of the cache,
    those of its own chunk, or the state after q - 1.
    """
    query = prompt_tokens - 1
    total = 0
    for group in engine.call("groups"):
        read = range(query)
        if group["spec"] == "SlidingWindowSpec":
            read = range(max(0, query - group["window"] + 1), query)
        elif group["spec"] == "ChunkedLocalAttentionSpec":
            read = range(query // group["chunk"] * group["chunk"], query)
        elif group["spec"] == "MambaSpec":
            read = range(query - 1, query)
        blocks = {position // group["block_size"] for position in read}
        moving = [block for block in blocks if block >= cached_blocks]
        total += len(moving) * group["data_bytes"] * len(group["layers"])
    return total


def stats_delta(engine: Engine, before: dict[str, Any]) -> dict[str, Any]:
    """What the connector has counted since `before` (a status)."""
    after = engine.status()["stats"]
    return {
        name: value - before["stats"].get(name, 0) if isinstance(value, int | float) else value
        for name, value in after.items()
    }
