"""`hma launch` without servers: --print, refused input, and the summary of a pair."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from connector.errors import ConfigError, HmaError, ModelError, ResourceError, StackError
from connector.wire.messages import CapacityDescription, EngineDescription, GroupDescription
from hma_cli.app import app
from hma_cli.cluster import launch as planning
from hma_cli.cluster import stack
from hma_cli.cluster.machine import GIB, Machine
from hma_cli.cluster.model import Model
from hma_cli.cluster.proof import Moved, Probe
from hma_cli.cluster.sizing import CpuShare
from hma_cli.cluster.summary import summary
from hma_cli.cluster.supervisor import ChildState, LaunchState
from hma_cli.cluster.topology import PortPlan, Settings, build_topology
from hma_cli.commands.launch import rows, vllm_arguments


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": 1000, "sliding_window": 64}))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the stack, two cores and 24 GiB, whatever the tests run on."""
    monkeypatch.setattr(planning, "require_stack", lambda **_: None)
    monkeypatch.setattr(planning, "device", lambda _machine: "cpu")
    monkeypatch.setattr(planning, "inspect_machine", lambda: Machine(cores=(0, 1), physical=2, memory_free=24 * GIB))


def hma(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["launch", *arguments])


def refused(*arguments: str) -> HmaError:
    error = hma(*arguments).exception
    assert isinstance(error, HmaError), error
    return error


def test_print_shows_the_commands_and_starts_nothing(model: Path, tmp_path: Path) -> None:
    done = hma("--model", str(model), "--print", "--decode", "2", "--state-dir", str(tmp_path), "--", "--seed", "1")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert [line.count("VLLM_CPU_OMP_THREADS_BIND=") for line in lines] == [1, 1, 1, 0]
    assert all(line.endswith("--seed 1") for line in lines[:3])
    assert "--vllm-pd-disaggregation" in lines[3]
    assert not (tmp_path / "launches").exists()


def test_print_as_json_lists_argv_and_environment(model: Path) -> None:
    data = json.loads(hma("--model", str(model), "--print", "--format", "json").stdout)
    assert data["schema"] == "hma.launch-plan/1"
    assert [command["name"] for command in data["commands"]] == ["prefill-0", "decode-0", "router"]
    assert data["commands"][0]["env"]["VLLM_CPU_KVCACHE_SPACE"] is None


def test_a_taken_port_is_refused_before_anything_else() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused("--model", "/no/model", "--print", "--port", str(port))
    assert isinstance(error, ResourceError)
    assert f"Port {port}" in error.message


def test_bad_input_is_one_sentence_and_a_remedy(model: Path) -> None:
    cases = [
        (("--model", "/no/such/model"), ModelError),
        (("--model", str(model), "--kv-space", "500"), ResourceError),
        (("--model", str(model), "--", "--disable-hybrid-kv-cache-manager"), ConfigError),
        (("stray",), ConfigError),
    ]
    for arguments, kind in cases:
        error = refused(*arguments)
        assert isinstance(error, kind)
        assert error.remedy
        assert error.message.count("\n") == 0


def test_values_out_of_range_are_refused_by_the_command_line(model: Path) -> None:
    for arguments in (("--prefill", "0"), ("--block-size", "0"), ("--connector", "tcp"), ("--nonsense",)):
        assert hma("--model", str(model), *arguments).exit_code == 2


def test_a_missing_stack_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "find_spec", lambda name: None if name in ("vllm", "nixl") else object())
    with pytest.raises(StackError, match="vLLM and NIXL are not installed") as caught:
        stack.require_stack(connector="hma", router=True)
    assert "pip install 'hma[cpu]'" in caught.value.remedy
    with pytest.raises(StackError, match="vLLM is not installed"):
        stack.require_stack(connector=None, router=False)


def test_a_gpu_build_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "_is_cpu_build", lambda: False)
    with pytest.raises(ResourceError, match="built for GPUs"):
        stack.device(Machine(cores=(0,), physical=1, memory_free=1))


@pytest.mark.parametrize(("words", "expected"), [([], ()), (["--a", "b"], ("--a", "b")), (["-tp", "2"], ("-tp", "2"))])
def test_what_follows_the_dashes_goes_to_vllm(words: list[str], expected: tuple[str, ...]) -> None:
    assert vllm_arguments(words) == expected


def engine(*, hybrid: bool = True, hma: bool = True) -> EngineDescription:
    windowed = GroupDescription(
        index=0,
        kind="sliding_window",
        window=64,
        chunk=None,
        num_layers=5,
        block_size=32,
        page_bytes=4096,
        layers=("a",),
        pages=(),
    )
    full = GroupDescription(
        index=1,
        kind="full",
        window=None,
        chunk=None,
        num_layers=1,
        block_size=32,
        page_bytes=4096,
        layers=("b",),
        pages=(),
    )
    return EngineDescription(
        engine_id="e",
        epoch="x",
        role="both",
        model="m",
        versions={},
        fields={},
        groups=(windowed, full) if hybrid else (full,),
        ranks=(),
        num_blocks=10,
        hma_enabled=hma,
        prefix_caching=True,
        capacity=CapacityDescription(request_tokens=2048, hma_tokens=9000 if hma else 2000, full_tokens=2000),
    )


def session(described: EngineDescription | None, settings: Settings | None = None) -> Any:
    settings = settings or Settings()
    topology = build_topology(
        settings,
        model=Model(
            name="tiny",
            source="/m",
            vocab_size=10,
            window=64,
            weight_bytes=0,
            max_positions=2048,
            windowed_layers=5,
            layers=6,
        ),
        shares=(CpuShare(cores=((0,),), kv_bytes=GIB), CpuShare(cores=((1,),), kv_bytes=GIB)),
        ports=PortPlan(servers=((1, 2), (3, 4)), router=(5, 6)),
        launch_id="l",
        python="python",
    )
    moved = Moved(
        requests=1, bytes_planned=8, bytes_moved=8, descriptors_planned=4, descriptors_posted=2, claims_granted=1
    )
    engines = (("prefill-0", described), ("decode-0", described)) if described else ()
    return SimpleNamespace(
        topology=topology,
        probe=Probe(prompt_tokens=201, max_model_len=2048, seconds=0.5, moved=moved, engines=engines),
        pid=lambda _name: 42,
        log=lambda name: Path("/logs") / f"{name}.log",
        log_dir=Path("/logs"),
    )


def test_the_summary_of_a_hybrid_pair() -> None:
    result = summary(session(engine()))
    assert result.schema == "hma.launch/1"
    json.dumps(result.data)
    assert result.data["groups"][0] == {
        "index": 0,
        "kind": "sliding_window",
        "window": 64,
        "layers": 5,
        "block_size": 32,
        "page_bytes": 4096,
    }
    assert result.data["capacity"] == {"request_tokens": 2048, "hma_tokens": 9000, "full_tokens": 2000}
    assert result.data["probe"]["bytes_moved"] == 8
    texts = [finding.text for finding in result.findings]
    assert any("9,000 tokens, without HMA 2,000 (4.5 times as many)" in text for text in texts)
    assert "curl http://127.0.0.1:5/v1/completions" in result.text


def test_the_summary_says_when_hma_brings_nothing() -> None:
    result = summary(session(engine(hybrid=False)))
    assert any("HMA brings nothing" in finding.text for finding in result.findings)
    assert result.data["hybrid"] is False


def test_hma_off_is_loud_and_has_a_cause_and_a_price() -> None:
    settings = Settings(require_hma=False, extra_args=("--disable-hybrid-kv-cache-manager",))
    result = summary(session(engine(hma=False), settings))
    (warning,) = [finding for finding in result.findings if finding.level == "warning"]
    assert "HMA IS OFF in prefill-0 and decode-0, as --disable-hybrid-kv-cache-manager asks" in warning.text
    assert "5.2 times the KV space" in warning.text


def test_the_in_tree_connector_has_no_groups_to_show() -> None:
    result = summary(session(None, Settings(connector="nixl")))
    assert result.data["capacity"] is None
    assert len(result.tables) == 1


def test_the_live_view_shows_children_and_the_probe() -> None:
    state = LaunchState(children=(ChildState(name="prefill-0"),), deadline=1.0, phase="probing")
    assert [row.name for row in rows(state)] == ["prefill-0", "probe"]
