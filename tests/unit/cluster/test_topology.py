"""Argv and environment of each process: the golden commands and the rules behind them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from connector.errors import ConfigError
from hma_cli.cluster.machine import GIB
from hma_cli.cluster.model import Model
from hma_cli.cluster.sizing import CpuShare, GpuShare, Share
from hma_cli.cluster.topology import PortPlan, Settings, Topology, build_topology, shell_lines

GOLDEN = Path(__file__).parent / "golden"
MODEL = Model(name="tiny", source="/models/tiny", vocab_size=1000, window=64, weight_bytes=GIB)


def cpu(core: int) -> CpuShare:
    return CpuShare(cores=((core,),), kv_bytes=GIB)


def topology(settings: Settings, *, shares: tuple[Share, ...] | None = None, model: Model = MODEL) -> Topology:
    count = len(settings.roles)
    ports = PortPlan(
        servers=tuple((21000 + 10 * i, 21001 + 10 * i) for i in range(count)),
        router=(20000, 20001) if settings.connector else None,
    )
    return build_topology(
        settings,
        model=model,
        shares=shares or tuple(cpu(i) for i in range(count)),
        ports=ports,
        launch_id="launch",
        python="python",
    )


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1]


@pytest.mark.parametrize(
    ("name", "settings", "shares"),
    [
        ("cpu_pair", Settings(block_size=32, max_model_len=2048), None),
        ("cpu_nixl", Settings(connector="nixl", require_hma=False), None),
        ("cpu_engine", Settings(connector=None, extra_args=("--enforce-eager",)), None),
        (
            "gpu_two_decodes",
            Settings(decode=2, failure_policy="fail", host="0.0.0.0"),
            tuple(GpuShare(gpus=(str(i),), utilisation=0.9) for i in range(3)),
        ),
    ],
)
def test_golden_commands(name: str, settings: Settings, shares: tuple[Share, ...] | None) -> None:
    expected = (GOLDEN / f"{name}.txt").read_text().splitlines()
    assert list(shell_lines(topology(settings, shares=shares))) == expected


def test_a_printed_line_is_what_would_run() -> None:
    server = topology(Settings()).servers[0]
    words = shlex.split(shell_lines(topology(Settings()))[0])
    assert tuple(words[len(words) - len(server.argv) :]) == server.argv
    assert words[0] == "env"
    assert "VLLM_HOST_IP=127.0.0.1" in words


def test_servers_that_share_cores_are_bound_to_none_and_have_one_thread_each() -> None:
    shared = CpuShare(cores=((0, 1),), kv_bytes=GIB, shared=True)
    for server in topology(Settings(decode=2), shares=(shared,) * 3).servers:
        assert dict(server.env)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert dict(server.env)["OMP_NUM_THREADS"] == "1"
    for server in topology(Settings(decode=2)).servers:
        assert dict(server.env)["OMP_NUM_THREADS"] is None


def test_each_engine_has_an_id_and_a_control_port_of_its_own() -> None:
    configs = [
        json.loads(option(server.argv, "--kv-transfer-config")) for server in topology(Settings(decode=3)).servers
    ]
    assert len({config["engine_id"] for config in configs}) == 4
    assert len({config["kv_connector_extra_config"]["control_port"] for config in configs}) == 4
    assert {config["kv_connector_extra_config"]["control_host"] for config in configs} == {"127.0.0.1"}


def test_hma_is_asked_for_by_name_unless_it_is_not_required() -> None:
    assert "--no-disable-hybrid-kv-cache-manager" in topology(Settings()).servers[0].argv
    assert "--no-disable-hybrid-kv-cache-manager" not in topology(Settings(require_hma=False)).servers[0].argv


def test_the_callers_arguments_come_last_and_go_to_their_role() -> None:
    settings = Settings(extra_args=("--seed", "1"), prefill_args=("--max-num-batched-tokens", "64"))
    prefill, decode = topology(settings).servers
    assert prefill.argv[-4:] == ("--seed", "1", "--max-num-batched-tokens", "64")
    assert decode.argv[-2:] == ("--seed", "1")


def test_a_model_without_tokenizer_needs_none() -> None:
    bare = Model(name="bare", source="/bare", vocab_size=10, window=None, weight_bytes=0, has_tokenizer=False)
    assert "--skip-tokenizer-init" in topology(Settings(), model=bare).servers[0].argv


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ((), 1),
        (("--tensor-parallel-size", "2"), 2),
        (("--tensor-parallel-size=2", "-pp", "2"), 4),
        (("-tp", "4", "--tensor-parallel-size", "2"), 2),
    ],
)
def test_workers_follow_the_callers_parallel_sizes(arguments: tuple[str, ...], workers: int) -> None:
    assert Settings(extra_args=arguments).workers("decode") == workers


@pytest.mark.parametrize("arguments", [("-tp",), ("-tp", "x"), ("--tensor-parallel-size=0",)])
def test_a_parallel_size_that_is_none_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="needs a number"):
        Settings(extra_args=arguments).workers("prefill")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": 0},
        {"decode": 0},
        {"block_size": 0},
        {"max_model_len": -5},
        {"connector": "tcp"},
        {"failure_policy": "hope"},
        {"extra_args": ("--disable-hybrid-kv-cache-manager",)},
        {"decode_args": ("--disable-hybrid-kv-cache-manager",)},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError):
        Settings(**wrong)


def test_hma_may_be_turned_off_where_it_is_not_required() -> None:
    settings = Settings(require_hma=False, extra_args=("--disable-hybrid-kv-cache-manager",))
    assert topology(settings).servers[0].argv[-1] == "--disable-hybrid-kv-cache-manager"


def test_a_router_on_every_interface_is_reached_on_loopback() -> None:
    router = topology(Settings(host="0.0.0.0")).router
    assert router is not None
    assert router.url == "http://127.0.0.1:20000"
    assert option(router.argv, "--host") == "0.0.0.0"
