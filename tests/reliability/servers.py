"""vLLM servers that a test may kill, stop and start again on the same ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from hma_cli.cluster.guard import descendants
from hma_cli.cluster.metrics import Counters, read_metrics
from hma_cli.cluster.ports import Ports
from hma_cli.cluster.process import Child, ExitStatus, Grace, tail

READY_SECONDS = 240.0
LEASE = 6.0
SERVED = "model"
CONNECTORS = {"hma": "HmaNixlConnector", "nixl": "NixlConnector"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How every server of a run is started. connector None: engines alone. policy None: vLLM's default.

    extra: settings of our connector, beside the lease.
    """

    model: Path
    log_dir: Path
    connector: str | None = "hma"
    policy: str | None = "recompute"
    extra: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    kv_mib: int = 16

    def transfer_config(self, name: str, control_port: int, **extra: Any) -> dict[str, Any]:
        assert self.connector is not None
        settings: dict[str, Any] = {"kv_lease_duration": int(LEASE)}
        if self.connector == "hma":
            settings = {"lease_seconds": LEASE, "control_port": control_port, **self.extra, **extra}
        config = {"kv_connector": CONNECTORS[self.connector], "kv_role": "kv_both", "engine_id": name}
        if self.policy is not None:
            config["kv_load_failure_policy"] = self.policy
        return {**config, "kv_connector_extra_config": settings}


class Server:
    """One server on fixed ports, in one life after the other.

    unexpected: how lives ended that nobody here ended. life: how many were started. env: more of it for later lives.
    """

    def __init__(self, name: str, setup: Setup, *, core: int, ports: Ports) -> None:
        self.name, self.port, self.control_port = name, ports.pick(), ports.pick()
        ports.release(self.port, self.control_port)
        self.unexpected: list[str] = []
        self.life = 0
        self.env: dict[str, str] = {}
        self._setup, self._core = setup, core
        self._child: Child | None = None
        self._ended = asyncio.Event()
        self._ours = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self._setup.log_dir / f"{self.name}-{self.life}.log"

    @property
    def alive(self) -> bool:
        return self._child is not None and not self._ended.is_set()

    async def start(self, **extra: Any) -> None:
        """Start a life and wait until it answers. extra: settings of our connector for this life."""
        self.life += 1
        self._ours, self._ended = False, asyncio.Event()
        loop, ended = asyncio.get_running_loop(), self._ended

        def on_exit(_: str, status: ExitStatus) -> None:
            loop.call_soon_threadsafe(self._note_end, ended, status)

        own = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": str(self._core), "HF_HUB_OFFLINE": "1"}
        if self._setup.connector == "nixl":
            own |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.control_port),
            }
        changes = tuple({**own, **self.env}.items())
        self._child = Child(
            self.name,
            tuple(self._argv(extra)),
            changes,
            log=self.log,
            on_exit=on_exit,
            grace=Grace(interrupt=8, terminate=3, clear=1),
        )
        await asyncio.to_thread(self._child.start)
        await self._wait_ready()

    def kill(self) -> None:
        """SIGKILL to every process of the server at once, as when its machine is lost."""
        self._ours = True
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP to every process of it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def gone(self) -> None:
        """Wait until nothing of a killed life is left."""
        if self._child is not None:
            child, self._child = self._child, None
            self._ours = True
            child.stop()
            await asyncio.to_thread(child.wait)

    async def metrics(self) -> Counters:
        """Its counters; none of a server that is dead or dying, which is then waited for."""
        try:
            async with httpx.AsyncClient(timeout=20) as client:
                return read_metrics((await client.get(f"{self.url}/metrics")).text)
        except httpx.HTTPError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 20)
            return Counters()

    def rss_mib(self) -> float:
        """Resident memory of all its processes, shared pages counted once per process."""
        total = 0
        for pid in self._pids():
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(pid).memory_info().rss
        return total / (1 << 20)

    def _argv(self, extra: dict[str, Any]) -> list[str]:
        setup = self._setup
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.model)]
        argv += ["--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--seed", "0"]
        argv += ["--enforce-eager", "--distributed-executor-backend", "uni", "--max-num-seqs", "16"]
        argv += ["--kv-cache-memory-bytes", str(setup.kv_mib << 20), "--no-disable-hybrid-kv-cache-manager"]
        argv += ["--disable-uvicorn-access-log", "--no-enable-prefix-caching"]
        if setup.connector is not None:
            argv += ["--kv-transfer-config", json.dumps(setup.transfer_config(self.name, self.control_port, **extra))]
        return [*argv, *setup.arguments]

    def _pids(self) -> list[int]:
        return [] if self._child is None else [self._child.pid, *descendants(self._child.pid)]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _note_end(self, ended: asyncio.Event, status: ExitStatus) -> None:
        ended.set()
        if not self._ours:
            self.unexpected.append(f"{self.name} (life {self.life}) {status.text}")

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        async with httpx.AsyncClient(timeout=5) as client:
            while not self._ended.is_set() and time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.25)
        raise RuntimeError(f"{self.name} did not come up:\n" + "\n".join(tail(self.log, 40)))


async def restart(server: Server, **extra: Any) -> None:
    """Kill a server and start its next life. extra: settings of our connector for that life."""
    server.kill()
    await server.gone()
    await server.start(**extra)


@contextlib.asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    """Start servers side by side; end them all, whatever happens."""
    try:
        await asyncio.gather(*(server.start() for server in servers))
        yield
    finally:
        for server in servers:
            server.resume()
        await asyncio.gather(*(server.gone() for server in servers))
