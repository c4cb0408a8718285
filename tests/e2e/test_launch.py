"""`hma launch` with real engines: what it starts, proves and leaves behind. Three launches and one failed start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hma_cli.cluster.guard import SHARED_MEMORY, descendants, parent_of
from hma_cli.cluster.ports import is_free
from tests.models import edit_config, tiny_gemma3, tiny_qwen3

pytestmark = pytest.mark.e2e

READY_SECONDS = 240
STOP_SECONDS = 60


@dataclass
class Launch:
    """One `hma launch` process. `seen`: every process that was ever found below it."""

    process: subprocess.Popen[str]
    errors: Path
    seen: set[int]
    shared_before: set[str]
    summary: dict[str, Any]

    def look(self) -> set[int]:
        self.seen |= set(descendants(self.process.pid))
        return self.seen

    @property
    def ports(self) -> list[int]:
        servers = self.summary["servers"]
        urls = [server["url"] for server in servers] + [self.summary["router"]]
        return [int(url.rpartition(":")[2]) for url in urls] + [server["control_port"] for server in servers]

    def assert_nothing_left(self) -> None:
        """No process, no port, no shared memory."""
        assert self.seen
        assert [pid for pid in self.seen if parent_of(pid) is not None] == []
        assert [port for port in self.ports if not is_free(port)] == []
        left = {path.name for path in SHARED_MEMORY.iterdir()} - self.shared_before
        assert not {name for name in left if name.startswith(("psm_", "ucx_", "sem.loky"))}


@contextmanager
def launched(directory: Path, *arguments: str) -> Iterator[Launch]:
    """Start `hma launch` with JSON output and read its summary; the body ends it, or it is ended."""
    errors = directory / "stderr"
    shared = {path.name for path in SHARED_MEMORY.iterdir()}
    command = [sys.executable, "-c", "from hma_cli.app import main; main()", "launch", "--format", "json"]
    command += ["--state-dir", str(directory), "--kv-space", "0.5", *arguments]
    with errors.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    launch = Launch(process, errors, set(), shared, {})
    try:
        launch.summary = read_summary(launch)
        launch.look()
        yield launch
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)


def read_summary(launch: Launch) -> dict[str, Any]:
    """The JSON document on stdout; empty when the launch ends before it."""
    assert launch.process.stdout is not None
    deadline = time.monotonic() + READY_SECONDS
    text = ""
    while time.monotonic() < deadline:
        line = launch.process.stdout.readline()
        if not line:
            return {}
        text += line
        if line.rstrip() == "}":
            return dict(json.loads(text))
    raise AssertionError(f"no summary within {READY_SECONDS} s:\n{launch.errors.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    directory = tmp_path_factory.mktemp("hybrid")
    arguments = ("--model", str(tiny_gemma3()), "--block-size", "32", "--", "--enforce-eager")
    with launched(directory, *arguments) as launch:
        assert launch.summary, launch.errors.read_text()
        yield launch


def test_the_summary_proves_a_hybrid_pair(hybrid: Launch) -> None:
    summary = hybrid.summary
    assert summary["schema"] == "hma.launch/1"
    assert summary["hma"] is True
    assert summary["hybrid"] is True
    layers = {
        (kind, window): sum(group["layers"] for group in summary["groups"] if group["kind"] == kind)
        for kind, window in {(group["kind"], group["window"]) for group in summary["groups"]}
    }
    assert layers == {("sliding_window", 64): 11, ("full", None): 2}
    probe = summary["probe"]
    assert probe["prompt_tokens"] == 209  # three windows, half a block and one token
    # 208 tokens on D: seven blocks of a full layer; positions 145 … 207 of a sliding layer lie in three blocks.
    assert probe["descriptors_planned"] == 2 * 7 + 11 * 3
    assert probe["bytes_moved"] == probe["bytes_planned"] == (2 * 7 + 11 * 3) * 4096
    assert summary["capacity"]["hma_tokens"] > 2 * summary["capacity"]["full_tokens"]


def test_each_server_has_cores_and_ports_of_its_own(hybrid: Launch) -> None:
    assert len(set(hybrid.ports)) == len(hybrid.ports) == 5
    prefill, decode = (server["cores"] for server in hybrid.summary["servers"])
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(prefill[0]) & set(decode[0])


def test_a_completion_through_the_router(hybrid: Launch) -> None:
    import httpx

    body = {"model": hybrid.summary["model"], "prompt": list(range(100, 300)), "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{hybrid.summary['router']}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_an_idle_pair_is_quiet(hybrid: Launch) -> None:
    """Must show 5: less than 10 % of one core over 10 s, everything that the launcher started counted."""
    time.sleep(3)
    before = cpu_seconds(hybrid)
    time.sleep(10)
    assert cpu_seconds(hybrid) - before < 1.0


def cpu_seconds(launch: Launch) -> float:
    """CPU time of the launcher and everything below it."""
    total = 0
    for pid in (launch.process.pid, *descendants(launch.process.pid)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_ends_all_with_exit_code_0(hybrid: Launch) -> None:
    """Last of the module's tests on this pair: it ends it."""
    hybrid.look()
    hybrid.process.send_signal(signal.SIGINT)
    assert hybrid.process.wait(STOP_SECONDS) == 0
    hybrid.assert_nothing_left()
    assert "Traceback" not in hybrid.errors.read_text()


def test_a_model_without_windows_works_and_a_killed_worker_ends_all(tmp_path: Path) -> None:
    with launched(tmp_path, "--model", str(tiny_qwen3()), "--block-size", "32", "--", "--enforce-eager") as launch:
        assert launch.summary, launch.errors.read_text()
        assert launch.summary["hybrid"] is False
        assert launch.summary["probe"]["bytes_moved"] > 0
        decode = next(server for server in launch.summary["servers"] if server["role"] == "decode")
        launch.look()
        deepest = descendants(decode["pid"])[-1]  # the worker, two processes below the server
        os.kill(deepest, signal.SIGKILL)
        assert launch.process.wait(STOP_SECONDS) == 2
        launch.assert_nothing_left()
        told = " ".join(launch.errors.read_text().split())
        assert "Last lines of decode-0" in told
        assert "while it ran." in told.partition("error (process) decode-0")[2]


def test_two_decode_servers_read_from_one_prefill_server_also_when_they_outnumber_the_cores(tmp_path: Path) -> None:
    import httpx

    arguments = ("--model", str(tiny_gemma3()), "--decode", "2", "--block-size", "32", "--", "--enforce-eager")
    with launched(tmp_path, *arguments) as launch:
        assert launch.summary, launch.errors.read_text()
        servers, probe = launch.summary["servers"], launch.summary["probe"]
        assert [server["name"] for server in servers] == ["prefill-0", "decode-0", "decode-1"]
        assert {server["shared_cores"] for server in servers} == {len(os.sched_getaffinity(0)) < 3}
        assert probe["requests"] == 3  # one for each decode server and one through the router
        assert probe["bytes_moved"] == probe["bytes_planned"] == 3 * (2 * 7 + 11 * 3) * 4096
        body = {"model": launch.summary["model"], "max_tokens": 4, "temperature": 0}
        prompts = [list(range(start, start + 200)) for start in range(100, 180, 10)]
        with ThreadPoolExecutor(4) as pool, httpx.Client(timeout=60, trust_env=False) as client:
            url = f"{launch.summary['router']}/v1/completions"
            answers = list(pool.map(lambda prompt: client.post(url, json=body | {"prompt": prompt}), prompts))
        assert [answer.status_code for answer in answers] == [200] * len(prompts)
        launch.look()
        launch.process.send_signal(signal.SIGINT)
        assert launch.process.wait(STOP_SECONDS) == 0
        launch.assert_nothing_left()


def test_a_failed_start_ends_all_with_exit_code_2(tmp_path: Path) -> None:
    broken = edit_config(tiny_gemma3(), tmp_path / "broken", architectures=["NoSuchModel"], model_type="no_such_model")
    with launched(tmp_path, "--model", str(broken)) as launch:
        assert launch.summary == {}
        assert launch.process.wait(STOP_SECONDS) == 2
        told = " ".join(launch.errors.read_text().split())
        assert "before the launch was ready: vLLM cannot serve this model" in told
        assert "Traceback" not in told.partition("error (process)")[2]
        assert descendants(launch.process.pid) == []
