"""A running server's description beside the offline plan: no difference where there is none, every one by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from connector.errors import ConfigError
from connector.wire.described import described_groups, described_regions, described_shares
from connector.wire.messages import CapacityDescription, EngineDescription, RankDescription
from hma_cli.inspection import live
from hma_cli.inspection.inspect import Inspection, Request, inspect
from hma_cli.inspection.view import live_view
from hma_cli.models.lookup import find
from hma_cli.report.result import Exit

MODELS = {
    "windows": "google/gemma-3-270m",
    "one kind": "Qwen/Qwen3-0.6B",
    "chunks": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "latents": "deepseek-ai/DeepSeek-V3",
    "states with padding": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "pages of two sizes": "google/gemma-4-E4B-it",
}
CPU = ("one kind", "windows")


def running(model: str, *, tp: int = 1, device: str = "cuda", **changes: Any) -> EngineDescription:
    """What a server of `model` says of itself: the memory that vLLM would give it."""
    config = find(model, offline=True)
    request = Request(prompt_tokens=4096, prefill_tp=tp, decode_tp=tp, device=device)  # type: ignore[arg-type]
    case = inspect(config, request).case
    geometry = case.decode.ranks[0]
    described = EngineDescription(
        engine_id="P",
        epoch="e" * 32,
        role="kv_both",
        model=model,
        versions={"hma": "0", "vllm": "0.32.0"},
        fields={"model": model, "kv_dtype": "auto", "dtype": "bfloat16"},
        groups=described_groups(geometry),
        ranks=tuple(
            RankDescription(
                transport="nixl",
                memory="DRAM" if device == "cpu" else "VRAM",
                connection=b"",
                regions=described_regions(rank),
                shares=described_shares(rank),
            )
            for rank in case.decode.ranks
        ),
        num_blocks=geometry.num_blocks,
        hma_enabled=True,
        prefix_caching=case.decode.prefix_caching,
        capacity=CapacityDescription(request_tokens=0, hma_tokens=0, full_tokens=0),
    )
    described = msgspec.structs.replace(described, **changes)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(described), type=EngineDescription)


def looked_at(server: EngineDescription, **request: Any) -> tuple[Inspection, Inspection, tuple[live.Difference, ...]]:
    asked = live.asked_of(server, Request(**{"prompt_tokens": 4096, **request}))
    planned = inspect(find(server.model, offline=True), asked)
    found = live.live(planned, server)
    return planned, found, live.differences(planned, found, server)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_server_that_is_as_planned_has_no_differences(model: str, tp: int) -> None:
    server = running(model, tp=1 if model == "google/gemma-3-270m" else tp)
    planned, found, different = looked_at(server)
    assert different == ()
    result = live_view(found, server, different)
    assert result.exit_code is Exit.OK
    assert result.data["differences"] == []
    assert result.data["live"]["versions"] == {"hma": "0", "vllm": "0.32.0"}
    assert result.findings[0].level == "ok"
    assert "exactly the groups and pages that were planned" in result.findings[0].text
    assert found.plan.total == planned.plan.total
    assert found.totals["lower_bound"] == planned.totals["lower_bound"]


@pytest.mark.parametrize("name", CPU)
def test_memory_of_the_host_means_the_cpus_block_sizes(name: str) -> None:
    server = running(MODELS[name], device="cpu")
    asked = live.asked_of(server, Request(prompt_tokens=4096))
    assert (asked.device, asked.decode_block_size, asked.num_blocks) == ("cpu", 128, server.num_blocks)
    assert looked_at(server)[2] == ()


def test_a_given_block_size_is_not_overruled() -> None:
    asked = live.asked_of(running(MODELS["one kind"]), Request(prompt_tokens=4096, decode_block_size=64))
    assert (asked.prefill_block_size, asked.decode_block_size) == (16, 64)


def changed(index: int, **fields: Any) -> Callable[[EngineDescription], EngineDescription]:
    """One group of the server otherwise."""

    def change(server: EngineDescription) -> EngineDescription:
        groups = list(server.groups)
        groups[index] = msgspec.structs.replace(groups[index], **fields)
        return msgspec.structs.replace(server, groups=tuple(groups))

    return change


def fewer_groups(server: EngineDescription) -> EngineDescription:
    ranks = tuple(msgspec.structs.replace(rank, shares=rank.shares[:-1]) for rank in server.ranks)
    return msgspec.structs.replace(server, groups=server.groups[:-1], ranks=ranks)


def larger_blocks(server: EngineDescription) -> EngineDescription:
    rank = server.ranks[0]
    base, regions = 1 << 20, []
    for region in rank.regions:
        regions.append(msgspec.structs.replace(region, base=base, stride=32768, block_bytes=32768))
        base += 32768 * region.num_blocks
    return msgspec.structs.replace(server, ranks=(msgspec.structs.replace(rank, regions=tuple(regions)),))


def smaller_pages(server: EngineDescription) -> EngineDescription:
    pages = tuple(msgspec.structs.replace(page, num_bytes=page.num_bytes // 2) for page in server.groups[0].pages)
    return changed(0, pages=pages)(server)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (changed(0, window=256), {"groups[0].kind", "hma: descriptors"}),
        (changed(0, kind="full", window=None), {"groups[0].kind", "hma: descriptors", "hma: num_bytes"}),
        (changed(0, layers=("model.layers.9.a", "model.layers.1.a", "model.layers.3.a")), {"groups[0].layers"}),
        (changed(0, block_size=32), {"groups[0].block_size", "hma: descriptors"}),
        (smaller_pages, {"groups[0].page_bytes", "hma: num_bytes"}),
        (larger_blocks, {"bytes a block"}),
        (fewer_groups, {"groups", "hma: descriptors", "hma: num_bytes"}),
        (lambda server: msgspec.structs.replace(server, hma_enabled=False), {"HMA"}),
    ],
)
def test_every_difference_is_named(change: Callable[[EngineDescription], EngineDescription], fields: set[str]) -> None:
    server = change(running("google/gemma-3-270m"))
    _, found, different = looked_at(server)
    assert fields <= {one.field for one in different}
    assert all(one.planned != one.running for one in different)
    result = live_view(found, server, different)
    assert result.exit_code is Exit.CHECK_FAILED
    assert [one["field"] for one in result.data["differences"]] == [one.field for one in different]
    for one, finding in zip(different, result.findings, strict=False):
        assert finding.level == "problem"
        assert finding.text == f"{one.field}: planned {one.planned}, running {one.running}."


def test_a_server_that_is_still_starting_is_not_compared() -> None:
    for nothing in ({"groups": ()}, {"ranks": ()}):
        with pytest.raises(ConfigError, match="still starting"):
            live.asked_of(running(MODELS["one kind"], **nothing), Request(prompt_tokens=10))


def test_a_prompt_that_the_servers_pool_does_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not hold"):
        looked_at(running(MODELS["one kind"]), prompt_tokens=1_000_000)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5600", "127.0.0.1", 5600),
        ("127.0.0.1:5600", "127.0.0.1", 5600),
        ("tcp://prefill-0.svc:1/", "prefill-0.svc", 1),
        ("tcp://[::1]:65535", "::1", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert live.address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:80:80",
        "tcp://host",
        "udp://host:1",
        "a b:1",
        "h:１",
        "*:80",
        "tcp://%%:80",
        "tcp://a;b:80",
        "ü:80",
        "[::1:80",
        "::1:80",
        "user@host:80",
        "host:80/path",
        "a" * 300 + ":1",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a control channel"):
        live.address(text)


@pytest.mark.parametrize("text", ["http://127.0.0.1:8000", "https://host/v1"])
def test_an_http_address_is_told_from_a_control_address(text: str) -> None:
    with pytest.raises(ConfigError, match="HTTP") as caught:
        live.address(text)
    assert "hma launch" in caught.value.remedy
