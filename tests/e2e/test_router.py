"""Gemma 3 270M behind vllm-router: what a client sends is answered as one engine answers it, from KV that moved.

The reference is the decode server asked directly, without a handle; that such requests are those of an engine without a
connector is shown by the engine tests. Weights are float32: in bfloat16 one engine's own log-probabilities already
differ between a prefill and a decode of the same token, which would hide errors at the edge of a window.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hma_cli.cluster.metrics import difference, read_metrics
from hma_cli.cluster.pair import Pair, running_pair

pytestmark = pytest.mark.e2e

BLOCK = 64
WINDOW = 512
PAGE_BYTES = BLOCK * 1 * (256 + 256) * 4  # one KV head, K and V of 256, float32
ARGS = ("--dtype", "float32", "--enforce-eager")
LAYERS = {"sliding": 15, "full": 3}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with running_pair(block_size=BLOCK, max_model_len=2048, prefill_args=ARGS, decode_args=ARGS) as running:
        yield running


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=120, trust_env=False) as opened:
        yield opened


def ask(client: httpx.Client, url: str, pair: Pair, prompt: Any, **params: Any) -> httpx.Response:
    """Ask for 8 tokens. A salt of its own keeps each request out of the others' prefix cache: the reference must not be
    answered from KV that came over the wire."""
    body = {"model": pair.model_name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    body |= {"cache_salt": uuid.uuid4().hex, **params}
    return client.post(f"{url}/v1/completions", json=body)


def choices(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


def both(client: httpx.Client, pair: Pair, prompt: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    """The pair's choices and the reference's."""
    through = choices(ask(client, pair.router_url, pair, prompt, **params))
    return through, choices(ask(client, pair.decode[0].url, pair, prompt, **params))


def same(got: list[Any], wanted: list[Any], tolerance: float = 0.0) -> bool:
    """Tokens and finish reasons are equal; log-probabilities within `tolerance` where they were asked for."""
    for one, other in zip(got, wanted, strict=True):
        if (one["text"], one["finish_reason"]) != (other["text"], other["finish_reason"]):
            return False
        if one["logprobs"] is not None:
            ours, theirs = one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"]
            if one["logprobs"]["tokens"] != other["logprobs"]["tokens"]:
                return False
            if any(abs(a - b) > tolerance for a, b in zip(ours, theirs, strict=True)):
                return False
    return True


def counters(client: httpx.Client, pair: Pair) -> tuple[Any, Any]:
    return tuple(  # type: ignore[return-value]
        read_metrics(client.get(f"{server.url}/metrics").text) for server in (pair.prefill[0], pair.decode[0])
    )


def moved_since(client: httpx.Client, pair: Pair, before: tuple[Any, Any], requests: int = 1) -> dict[str, int]:
    """D's counters since `before`, once they account for `requests` (they reach /metrics a moment later)."""
    names = ("bytes_moved", "bytes_planned", "transfers", "fallbacks")
    for _ in range(50):
        d = difference(before[1], counters(client, pair)[1])
        moved = {name: int(d.total(f"vllm:hma_{name}_total")) for name in names}
        if moved["transfers"] + moved["fallbacks"] >= requests:
            break
        time.sleep(0.1)
    return moved


def live_bytes(tokens: int) -> int:
    """The exact live pages: D computes the last token, which sees the window before it in sliding layers."""
    query = tokens - 1
    full = -(-query // BLOCK)
    first = max(0, query - WINDOW + 1) // BLOCK
    return PAGE_BYTES * (LAYERS["full"] * full + LAYERS["sliding"] * (full - first))


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [2, *(rng.randrange(1000, 200_000) for _ in range(length - 1))]


EDGES = [63, 64, 65, 127, 511, 512, 513, 575, 576, 577, 639, 703, 1100]


@pytest.mark.parametrize("length", EDGES)
def test_edge_lengths(client: httpx.Client, pair: Pair, length: int) -> None:
    before = counters(client, pair)
    got, wanted = both(client, pair, random_prompt(length, length))
    assert same(got, wanted, tolerance=0.0005)
    assert moved_since(client, pair, before) == {
        "bytes_moved": live_bytes(length),
        "bytes_planned": live_bytes(length),
        "transfers": 1,
        "fallbacks": 0,
    }


def test_inspect_plan_shows_what_the_running_pair_then_moves(client: httpx.Client, pair: Pair) -> None:
    for server in (pair.prefill[0], pair.decode[0]):
        length = 1100
        words = ["--live", f"tcp://127.0.0.1:{server.control_port}", "--prompt-tokens", str(length), "--format", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "hma_cli", "inspect-plan", *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert shown["differences"] == []
        assert shown["live"]["engine_id"]
        assert shown["totals"]["hma"]["bytes"] == live_bytes(length)
        before = counters(client, pair)
        ask(client, pair.router_url, pair, random_prompt(length, seed=5))
        assert moved_since(client, pair, before)["bytes_moved"] == shown["totals"]["hma"]["bytes"]


def test_a_list_of_prompts_is_answered_one_by_one_from_kv_that_moved(client: httpx.Client, pair: Pair) -> None:
    prompts = [
        "one two three four five six seven",
        "The capital of France is",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "Monday Tuesday Wednesday Thursday",
    ]
    before = counters(client, pair)
    got, wanted = both(client, pair, prompts)
    assert len(got) == 4
    assert same(got, wanted, tolerance=0.0005)
    moved = moved_since(client, pair, before, requests=4)
    assert moved["transfers"] == 4
    assert moved["bytes_moved"] == moved["bytes_planned"] == 4 * live_bytes(10)  # one block in each layer
    assert moved["fallbacks"] == 0


def test_sixteen_at_once(client: httpx.Client, pair: Pair) -> None:
    prompts = [random_prompt(length, 7000 + length) for length in range(40, 680, 40)]
    wanted = [choices(ask(client, pair.decode[0].url, pair, prompt)) for prompt in prompts]
    before = counters(client, pair)
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda prompt: choices(ask(client, pair.router_url, pair, prompt)), prompts))
    assert [
        i for i, (one, other) in enumerate(zip(got, wanted, strict=True)) if one[0]["text"] != other[0]["text"]
    ] == []
    moved = moved_since(client, pair, before, requests=len(prompts))
    assert moved["bytes_moved"] == moved["bytes_planned"] == sum(live_bytes(len(prompt)) for prompt in prompts)
    assert moved["transfers"] == len(prompts)
    assert moved["fallbacks"] == 0


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2, "temperature": 0.7, "seed": 7},
        {"min_tokens": 6, "max_tokens": 6},
        {"stop": [" "], "max_tokens": 8},
        {"stop": ["\n"]},
        {"max_tokens": 1},
        {"logit_bias": {"1": 100.0}},
        {"logit_bias": {"1": -100.0}},
    ],
    ids=str,
)
def test_sampling_parameters_mean_what_they_mean_on_one_engine(
    client: httpx.Client, pair: Pair, params: dict[str, Any]
) -> None:
    got, wanted = both(client, pair, "The quick brown fox jumps over the lazy", **params)
    assert same(got, wanted, tolerance=0.0005)


def test_a_stream_is_the_same_text(client: httpx.Client, pair: Pair) -> None:
    import json

    prompt = "The largest planet of the solar system is"
    wanted = choices(ask(client, pair.decode[0].url, pair, prompt))[0]["text"]
    body = {"model": pair.model_name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    text = ""
    with client.stream("POST", f"{pair.router_url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[len("data: ") :])["choices"][0]["text"]
    assert text == wanted


@pytest.mark.parametrize(
    ("prompt", "params"),
    [(list(range(1000, 4000)), {}), ("Hello", {"temperature": -1}), ("Hello", {"model": "no-such-model"})],
    ids=["too long", "bad temperature", "unknown model"],
)
def test_a_refusal_reaches_the_client_and_holds_nothing(
    client: httpx.Client, pair: Pair, prompt: Any, params: dict[str, Any]
) -> None:
    through = ask(client, pair.router_url, pair, prompt, **params)
    direct = ask(client, pair.decode[0].url, pair, prompt, **params)
    assert through.status_code == direct.status_code
    assert 400 <= through.status_code < 500
