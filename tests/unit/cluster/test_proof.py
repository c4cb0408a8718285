"""The probe's verdict: from counters alone, and against fake servers that answer 200 and move nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hma_cli.cluster import proof
from hma_cli.cluster.metrics import Counters, difference, read_metrics
from hma_cli.cluster.model import Model
from hma_cli.cluster.proof import Unproven, judge, probe_prompt, prompt_length, prove
from hma_cli.cluster.sizing import CpuShare
from hma_cli.cluster.topology import Router, Server, Topology

GRANTED = "vllm:hma_claims_granted_total"


def counters(**values: float) -> Counters:
    return read_metrics(
        "\n".join(f'vllm:{name}{{engine="0",model_name="m"}} {value}' for name, value in values.items())
    )


GOOD_PREFILL = counters(hma_claims_granted_total=1)
GOOD_DECODE = counters(
    hma_bytes_planned_total=4096,
    hma_bytes_moved_total=4096,
    hma_descriptors_planned_total=4,
    hma_descriptors_posted_total=2,
)


def test_moved_bytes_and_a_granted_claim_prove_a_pair() -> None:
    moved = judge("hma", GOOD_PREFILL, GOOD_DECODE, requests=1)
    assert (moved.bytes_planned, moved.bytes_moved, moved.descriptors_posted) == (4096, 4096, 2)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        ("", "", "no KV moved from prefill to decode"),
        ('vllm:hma_claims_refused_total{reason="digest"} 1', "", r"no KV moved .*claim refused: digest"),
        (f"{GRANTED} 1", 'vllm:hma_fallbacks_total{reason="timeout"} 1', r"no KV moved .*fallback: timeout"),
        ("", "vllm:hma_bytes_moved_total 8\nvllm:hma_bytes_planned_total 8", r"Only 0 of the probe's 1 request"),
        (
            f"{GRANTED} 1",
            "vllm:hma_bytes_moved_total 8\nvllm:hma_bytes_planned_total 8\n"
            'vllm:hma_fallbacks_total{reason="failed",outcome="recompute"} 1',
            "fallback: failed",
        ),
        (
            f"{GRANTED} 1",
            "vllm:hma_bytes_moved_total 8\nvllm:hma_bytes_planned_total 9",
            "moved 8 bytes where the plan has 9",
        ),
    ],
)
def test_everything_else_does_not(prefill: str, decode: str, message: str) -> None:
    with pytest.raises(Unproven, match=message):
        judge("hma", read_metrics(prefill), read_metrics(decode), requests=1)


def test_a_claim_for_each_request_is_needed() -> None:
    with pytest.raises(Unproven, match="Only 1 of the probe's 2"):
        judge("hma", GOOD_PREFILL, GOOD_DECODE, requests=2)


def test_the_in_tree_connectors_bytes_count_too() -> None:
    decode = counters(nixl_bytes_transferred_sum=500, nixl_bytes_transferred_count=1, nixl_num_descriptors_sum=3)
    assert judge("nixl", Counters(), decode, requests=1).bytes_moved == 500
    with pytest.raises(Unproven, match="no KV moved"):
        judge("nixl", Counters(), counters(nixl_bytes_transferred_sum=0), requests=1)
    with pytest.raises(Unproven, match="1 failed transfers"):
        judge("nixl", Counters(), counters(nixl_num_failed_transfers_total=1), requests=1)


@pytest.mark.parametrize(
    ("window", "block", "limit", "expected"),
    [
        (512, 16, 32768, 1545),
        (64, 128, 32768, 449),
        (None, 16, 32768, 57),
        (8192, 16, 131072, 4096),
        (512, 16, 100, 96),
        (512, 16, 5, 2),
    ],
)
def test_the_probe_is_long_enough_and_never_too_long(window: int | None, block: int, limit: int, expected: int) -> None:
    assert prompt_length(window=window, block_size=block, max_model_len=limit) == expected


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 1000, 262144])
def test_a_prompt_lies_in_the_vocabulary_and_differs_each_time(vocabulary: int) -> None:
    prompt = probe_prompt(50, vocabulary, seed=1)
    assert len(prompt) == 50
    assert all(0 <= token < vocabulary for token in prompt)
    if vocabulary > 100:
        assert prompt != probe_prompt(50, vocabulary, seed=2)


def test_metrics_are_summed_over_servers_and_split_by_label() -> None:
    text = (
        '# HELP a b\na_total{r="x",s="q\\"z"} 1.0\na_total{r="y"} 2.0\na_created 9e9\nbroken{ line\nb_total nan-ish\n'
    )
    read = read_metrics(text + text)
    assert read.total("a_total") == 6.0
    assert read.by_label("a_total", "r") == {"x": 2.0, "y": 4.0}
    assert read.label("a_total", "s") == 'q\\"z'
    assert read.label("none", "s") is None
    assert difference(read_metrics(text), read).total("a_total") == 3.0


@dataclass
class FakeServer:
    """Answers like vLLM or the router. `on_completion` changes `metrics`, or gives the status that is answered."""

    metrics: dict[str, float] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    moves: Any = None
    handle: dict[str, Any] | None = None
    port: int = 0

    def serve(self) -> ThreadingHTTPServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.reply(200, "\n".join(f"{name} {value}" for name, value in fake.metrics.items()))
                else:
                    self.reply(200, json.dumps({"data": [{"max_model_len": 256}]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.seen.append(body)
                status = fake.statuses.pop(0) if fake.statuses else 200
                if status == 200 and fake.moves is not None:
                    fake.moves()
                self.reply(status, json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": fake.handle}))

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


@dataclass
class FakePair:
    prefill: FakeServer
    decode: FakeServer
    router: FakeServer
    topology: Topology


def fake_topology(prefill: FakeServer, decodes: list[FakeServer], router: FakeServer) -> Topology:
    share = CpuShare(cores=((0,),), kv_bytes=1)

    def server(role: Any, index: int, port: int) -> Server:
        return Server(role=role, index=index, http_port=port, control_port=None, share=share, argv=(), env=())

    return Topology(
        model=Model(name="m", source="m", vocab_size=1000, window=64, weight_bytes=0),
        connector="nixl",
        servers=(
            server("prefill", 0, prefill.port),
            *(server("decode", index, decode.port) for index, decode in enumerate(decodes)),
        ),
        router=Router(host="127.0.0.1", http_port=router.port, prometheus_port=1, argv=()),
    )


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePair]:
    monkeypatch.setattr(proof, "_COUNTER_PATIENCE", 0.6)
    monkeypatch.setattr(proof, "_ROUTER_PATIENCE", 3.0)
    fakes = FakeServer(), FakeServer(), FakeServer()
    servers = [fake.serve() for fake in fakes]
    yield FakePair(*fakes, fake_topology(fakes[0], [fakes[1]], fakes[2]))
    for server in servers:
        server.shutdown()
        server.server_close()


def transfer(server: FakeServer) -> None:
    for name, amount in (("sum", 4096.0), ("count", 1.0)):
        key = f"vllm:nixl_bytes_transferred_{name}"
        server.metrics[key] = server.metrics.get(key, 0.0) + amount


def test_a_pair_that_moves_is_proven(pair: FakePair) -> None:
    pair.router.moves = lambda: transfer(pair.decode)
    found = prove(pair.topology, require_hma=True)
    assert found.moved.bytes_moved == 4096
    assert found.prompt_tokens == 201
    assert found.hybrid is None
    (body,) = pair.router.seen
    assert len(body["prompt"]) == 201


def test_a_pair_that_answers_and_moves_nothing_is_not(pair: FakePair) -> None:
    with pytest.raises(Unproven, match="answered, but no KV moved"):
        prove(pair.topology, require_hma=True)


def test_counters_from_before_the_probe_do_not_count(pair: FakePair) -> None:
    transfer(pair.decode)
    with pytest.raises(Unproven, match="answered, but no KV moved"):
        prove(pair.topology, require_hma=True)


def test_a_router_that_is_not_ready_is_asked_again(pair: FakePair) -> None:
    pair.router.statuses = [503, 503]
    pair.router.moves = lambda: transfer(pair.decode)
    assert prove(pair.topology, require_hma=True).moved.requests == 1
    assert len(pair.router.seen) == 3


@pytest.mark.parametrize("status", [400, 500])
def test_an_error_from_the_router_is_told(pair: FakePair, status: int) -> None:
    pair.router.statuses = [status]
    with pytest.raises(Unproven, match=f"HTTP {status}"):
        prove(pair.topology, require_hma=True)


def test_every_server_of_a_larger_launch_is_probed(pair: FakePair) -> None:
    second = FakeServer()
    server = second.serve()
    pair.prefill.handle = {"do_remote_prefill": True}
    pair.decode.moves = lambda: transfer(pair.decode)
    second.moves = lambda: transfer(second)
    pair.router.moves = lambda: transfer(second)
    try:
        found = prove(fake_topology(pair.prefill, [pair.decode, second], pair.router), require_hma=True)
    finally:
        server.shutdown()
        server.server_close()
    assert found.moved.requests == 3
    assert [body["kv_transfer_params"] for body in pair.decode.seen + second.seen] == [{"do_remote_prefill": True}] * 2


def test_a_prefill_server_without_connector_is_noticed(pair: FakePair) -> None:
    topology = fake_topology(pair.prefill, [pair.decode, pair.decode], pair.router)
    with pytest.raises(Unproven, match="prefill-0 gave no handle"):
        prove(topology, require_hma=True)
