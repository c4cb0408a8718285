"""Proof that a pair is one: both sides agree, HMA is on, and the bytes of a probe moved from prefill to decode.

A 200 proves nothing: a decode server without a connector, or a router in another mode, answers every prompt by
computing it again. So the probe reads both sides' counters before and after, and only moved bytes count.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connector.errors import PeerUnreachable, ProcessError
from hma_cli.cluster.metrics import Counters, difference, read_metrics
from hma_cli.cluster.topology import LOOPBACK, Server, Topology

if TYPE_CHECKING:
    import httpx

    from connector.wire.messages import EngineDescription

PROBE_OUTPUT = 4
LONGEST_PROBE = 4096
_ROUTER_PATIENCE = 45.0  # vllm-router answers 503 until it has looked at its workers
_COUNTER_PATIENCE = 10.0  # counters reach /metrics with the engine's next statistics
_REQUEST_TIMEOUT = 180.0


class Unproven(ProcessError):
    """The pair answers, but it is not proven to move KV."""

    code = "unproven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What the probe's requests did, by the servers' own counters."""

    requests: int
    bytes_planned: int
    bytes_moved: int
    descriptors_planned: int
    descriptors_posted: int
    claims_granted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The proof. engines: name and description of every server, empty for the in-tree connector, which has no control
    channel. seconds: from the first request to the last counter."""

    prompt_tokens: int
    max_model_len: int
    seconds: float
    moved: Moved
    engines: tuple[tuple[str, EngineDescription], ...] = ()

    @property
    def hybrid(self) -> bool | None:
        """Whether HMA has anything to save; None where no engine describes itself."""
        if not self.engines:
            return None
        return any(group.kind != "full" for group in self.engines[0][1].groups)


def prove(topology: Topology, *, require_hma: bool) -> Probe:
    """Send the probe. Raises Unproven or IncompatiblePeer; one request takes three minutes at most."""
    import httpx

    engines = describe_all(topology) if topology.connector == "hma" else ()
    check_engines(engines, require_hma=require_hma)
    with httpx.Client(timeout=_REQUEST_TIMEOUT, trust_env=False) as client:
        return _probe(client, topology, engines)


def describe_all(topology: Topology) -> tuple[tuple[str, EngineDescription], ...]:
    """Every server's description, over its control channel."""
    from connector.control.client import describe

    found = []
    for server in topology.servers:
        if server.control_port is None:
            raise Unproven(f"{server.name} has no control channel.")
        try:
            found.append((server.name, describe(LOOPBACK, server.control_port, timeout=10.0)))
        except PeerUnreachable as error:
            raise Unproven(
                f"{server.name} does not answer on its control channel, port {server.control_port}.",
                remedy="Check in its log that it runs HmaNixlConnector.",
            ) from error
    return tuple(found)


def check_engines(engines: tuple[tuple[str, EngineDescription], ...], *, require_hma: bool) -> None:
    """IncompatiblePeer unless every prefill fits every decode; Unproven where HMA is off but required."""
    from connector.wire.compare import check

    prefill = [item for item in engines if item[0].startswith("prefill")]
    decode = [item for item in engines if item[0].startswith("decode")]
    for d_name, d in decode:
        for p_name, p in prefill:
            check(d, p, our_name=d_name, their_name=p_name)
    off = [name for name, engine in engines if not engine.hma_enabled]
    if off and require_hma:
        raise Unproven(
            f"HMA is off in {' and '.join(off)}.",
            remedy="Remove what turns it off, or give --no-require-hma to launch without it.",
        )


def prompt_length(*, window: int | None, block_size: int, max_model_len: int) -> int:
    """Tokens of the probe: past three windows or blocks and off every block edge, as far as the model allows.

    >>> prompt_length(window=512, block_size=16, max_model_len=32768)
    1545
    >>> prompt_length(window=64, block_size=32, max_model_len=128)
    124
    """
    wanted = min(3 * max(window or 0, block_size) + block_size // 2 + 1, LONGEST_PROBE)
    return max(2, min(wanted, max_model_len - PROBE_OUTPUT))


def probe_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Random token ids, so that no prefix cache knows them; the lowest ids, which are often special, are left out."""
    low = min(16, vocab_size - 1)
    high = max(low + 1, min(vocab_size, 30_000))
    generator = random.Random(seed)
    return [generator.randrange(low, high) for _ in range(length)]


def judge(connector: str, prefill: Counters, decode: Counters, *, requests: int) -> Moved:
    """Whether these differences of counters prove that `requests` prompts moved. Unproven says what is wrong."""
    if connector == "nixl":
        moved = int(decode.total("vllm:nixl_bytes_transferred_sum"))
        count = int(decode.total("vllm:nixl_bytes_transferred_count"))
        failed = int(decode.total("vllm:nixl_num_failed_transfers_total"))
        if moved == 0 or count < requests or failed:
            raise _not_moved(
                moved=moved, done=count, requests=requests, reasons=[f"{failed} failed transfers"] * (failed > 0)
            )
        posted = int(decode.total("vllm:nixl_num_descriptors_sum"))
        return Moved(
            requests=requests,
            bytes_planned=moved,
            bytes_moved=moved,
            descriptors_planned=posted,
            descriptors_posted=posted,
            claims_granted=0,
        )
    result = Moved(
        requests=requests,
        bytes_planned=int(decode.total("vllm:hma_bytes_planned_total")),
        bytes_moved=int(decode.total("vllm:hma_bytes_moved_total")),
        descriptors_planned=int(decode.total("vllm:hma_descriptors_planned_total")),
        descriptors_posted=int(decode.total("vllm:hma_descriptors_posted_total")),
        claims_granted=int(prefill.total("vllm:hma_claims_granted_total")),
    )
    reasons = [
        *(f"claim refused: {reason}" for reason in prefill.by_label("vllm:hma_claims_refused_total", "reason")),
        *(f"fallback: {reason}" for reason in decode.by_label("vllm:hma_fallbacks_total", "reason")),
    ]
    if result.bytes_moved == 0 or result.claims_granted < requests or reasons:
        raise _not_moved(moved=result.bytes_moved, done=result.claims_granted, requests=requests, reasons=reasons)
    if result.bytes_moved != result.bytes_planned:
        raise Unproven(
            f"The probe moved {result.bytes_moved:,} bytes where the plan has {result.bytes_planned:,}.",
            remedy="This is an error in the connector: please report it with the logs.",
        )
    return result


def _not_moved(*, moved: int, done: int, requests: int, reasons: list[str]) -> Unproven:
    why = f" ({'; '.join(reasons)})" if reasons else ""
    if moved == 0:
        return Unproven(
            f"The probe was answered, but no KV moved from prefill to decode{why}.",
            remedy="Check that every server runs the connector and that the router is in P/D mode; see the logs.",
        )
    return Unproven(
        f"Only {done} of the probe's {requests} request(s) went from prefill to decode as planned{why}.",
        remedy="See the servers' logs.",
    )


def _probe(client: httpx.Client, topology: Topology, engines: tuple[tuple[str, EngineDescription], ...]) -> Probe:
    prefill, decode, model = topology.of("prefill"), topology.of("decode"), topology.model
    before = _both(client, topology)
    limit = min(_model_limit(client, server) for server in topology.servers)
    block_size = max([group.block_size for _, engine in engines for group in engine.groups], default=0)
    block_size = block_size or int(before[1].label("vllm:cache_config_info", "block_size") or 16)
    windows = [group.window for _, engine in engines for group in engine.groups if group.window is not None]
    length = prompt_length(window=max(windows, default=model.window), block_size=block_size, max_model_len=limit)
    started = time.monotonic()
    requests = 0
    if len(prefill) * len(decode) > 1:  # the router may not use all of them: every server gets a request of its own
        for index in range(max(len(prefill), len(decode))):
            prompt = probe_prompt(length, model.vocab_size, random.randrange(1 << 30))
            pair = prefill[index % len(prefill)], decode[index % len(decode)]
            _ask_directly(client, *pair, model=model.name, prompt=prompt)
            requests += 1
    prompt = probe_prompt(length, model.vocab_size, random.randrange(1 << 30))
    _ask_router(client, topology, prompt)
    moved = _await_counters(client, topology, before, requests + 1)
    return Probe(
        prompt_tokens=length,
        max_model_len=limit,
        seconds=time.monotonic() - started,
        moved=moved,
        engines=engines,
    )


def _await_counters(
    client: httpx.Client, topology: Topology, before: tuple[Counters, Counters], requests: int
) -> Moved:
    """Judge the counters until they prove it; what they lack at the end of the patience is the error."""
    deadline = time.monotonic() + _COUNTER_PATIENCE
    while True:
        now = _both(client, topology)
        try:
            return judge(
                topology.connector or "",
                difference(before[0], now[0]),
                difference(before[1], now[1]),
                requests=requests,
            )
        except Unproven:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.25)


def _both(client: httpx.Client, topology: Topology) -> tuple[Counters, Counters]:
    """The counters of all prefill and of all decode servers."""
    return tuple(  # type: ignore[return-value]
        read_metrics("\n".join(_get(client, server, "/metrics").text for server in topology.of(role)))
        for role in ("prefill", "decode")
    )


def _model_limit(client: httpx.Client, server: Server) -> int:
    """The server's max_model_len, as /v1/models tells it."""
    try:
        return int(_get(client, server, "/v1/models").json()["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unproven(f"{server.name} does not tell its maximum length.") from error


def _get(client: httpx.Client, server: Server, path: str) -> httpx.Response:
    import httpx

    try:
        return client.get(server.url + path).raise_for_status()
    except httpx.HTTPError as error:
        raise Unproven(f"{server.name} does not answer {path}: {error}.") from error


def _body(model: str, prompt: list[int], tokens: int = PROBE_OUTPUT) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _ask_router(client: httpx.Client, topology: Topology, prompt: list[int]) -> None:
    if topology.router is None:
        raise Unproven("There is no router to send the probe through.")
    deadline = time.monotonic() + _ROUTER_PATIENCE
    body = _body(topology.model.name, prompt)
    while True:
        try:
            _post(client, topology.router.url, "the router", body)
        except _NotYet as error:
            if time.monotonic() > deadline:
                raise Unproven(f"{error.message}", remedy="See the router's log.") from error
            time.sleep(0.5)
        else:
            return


def _ask_directly(client: httpx.Client, prefill: Server, decode: Server, *, model: str, prompt: list[int]) -> None:
    """What a router does: prefill keeps the prompt's KV and hands out a handle, decode comes with it."""
    offer = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    first = _post(client, prefill.url, prefill.name, _body(model, prompt, 1) | {"kv_transfer_params": offer})
    handle = first.get("kv_transfer_params")
    if not handle:
        raise Unproven(
            f"{prefill.name} gave no handle for the prompt's KV.", remedy="Check that it runs the connector."
        )
    _post(client, decode.url, decode.name, _body(model, prompt) | {"kv_transfer_params": handle})


class _NotYet(Unproven):
    """Not ready to answer: worth another try."""


def _post(client: httpx.Client, url: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    import httpx

    try:
        response = client.post(f"{url}/v1/completions", json=body)
    except httpx.ConnectError as error:
        raise _NotYet(f"{name} cannot be reached: {error}.") from error
    except httpx.HTTPError as error:
        raise Unproven(f"{name} gave no answer to the probe: {error or type(error).__name__}.") from error
    if response.status_code == 503:
        raise _NotYet(f"{name} answers 503: {response.text.strip()[:200]}")
    if response.status_code != 200:
        raise Unproven(f"{name} answers the probe with HTTP {response.status_code}: {response.text.strip()[:300]}")
    try:
        answer = response.json()
    except ValueError as error:
        raise Unproven(f"{name} answers the probe with something that is not JSON.") from error
    if not isinstance(answer, dict) or not answer.get("choices"):
        raise Unproven(f"{name} answers the probe without a completion.")
    return answer
