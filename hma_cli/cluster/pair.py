"""A running pair or a running engine for other code: `hma verify`, benchmarks and tests.

Both are context managers: what they start is ready when the body begins and gone when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from connector.errors import ProcessError
from hma_cli.cluster.launch import make_log_directory, planned_launch
from hma_cli.cluster.proof import Probe
from hma_cli.cluster.session import Session
from hma_cli.cluster.supervisor import LaunchState
from hma_cli.cluster.topology import Connector, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """One vLLM server that is up. `control_port` answers `connector.control.client.describe` (None for the in-tree
    connector and for an engine without one); `log` holds its output; `pid` is the server's own process."""

    name: str
    url: str
    control_port: int | None
    pid: int
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Prefill and decode servers behind a router, proven to move KV. `probe` is the proof (hma_cli.cluster.proof)."""

    router_url: str
    prefill: tuple[RunningServer, ...]
    decode: tuple[RunningServer, ...]
    model_name: str
    model_path: str
    log_dir: Path
    probe: Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One plain vLLM server without a connector: the baseline."""

    url: str
    model_name: str
    model_path: str
    pid: int
    log: Path


@contextmanager
def running_pair(
    *,
    model: str | None = None,
    connector: str = "hma",
    block_size: int | None = None,
    max_model_len: int | None = None,
    prefill_args: tuple[str, ...] = (),
    decode_args: tuple[str, ...] = (),
    port: int | None = None,
    kv_space_gib: float | None = None,
    failure_policy: str = "recompute",
    ready_timeout: float = 300.0,
    on_change: Callable[[LaunchState], None] | None = None,
    state_dir: Path | None = None,
) -> Iterator[Pair]:
    """One prefill and one decode server and a router, ready and proven; raises an HmaError otherwise."""
    settings = Settings(
        connector=cast("Connector", connector),
        block_size=block_size,
        max_model_len=max_model_len,
        port=port,
        kv_space_gib=kv_space_gib,
        failure_policy=cast("Any", failure_policy),
        prefill_args=prefill_args,
        decode_args=decode_args,
    )
    with _session(settings, model, ready_timeout, on_change, state_dir) as session:
        yield pair_of(session)


@contextmanager
def running_engine(
    *,
    model: str | None = None,
    block_size: int | None = None,
    max_model_len: int | None = None,
    args: tuple[str, ...] = (),
    kv_space_gib: float | None = None,
    ready_timeout: float = 300.0,
    on_change: Callable[[LaunchState], None] | None = None,
    state_dir: Path | None = None,
) -> Iterator[Engine]:
    """One plain vLLM server with the pair's settings for block size, length and KV space."""
    settings = Settings(
        connector=None,
        block_size=block_size,
        max_model_len=max_model_len,
        kv_space_gib=kv_space_gib,
        extra_args=args,
    )
    with _session(settings, model, ready_timeout, on_change, state_dir) as session:
        server = session.topology.servers[0]
        yield Engine(
            url=server.url,
            model_name=session.topology.model.name,
            model_path=session.topology.model.source,
            pid=session.pid(server.name),
            log=session.log(server.name),
        )


def pair_of(session: Session) -> Pair:
    """The running pair of a ready session."""
    topology = session.topology
    if topology.router is None or session.probe is None:
        raise ProcessError("This launch is not a pair, or it is not ready.")
    prefill, decode = (
        tuple(
            RunningServer(
                name=server.name,
                url=server.url,
                control_port=server.control_port if topology.connector == "hma" else None,
                pid=session.pid(server.name),
                log=session.log(server.name),
            )
            for server in topology.of(role)
        )
        for role in ("prefill", "decode")
    )
    return Pair(
        router_url=topology.router.url,
        prefill=prefill,
        decode=decode,
        model_name=topology.model.name,
        model_path=topology.model.source,
        log_dir=session.log_dir,
        probe=session.probe,
    )


@contextmanager
def _session(
    settings: Settings,
    model: str | None,
    ready_timeout: float,
    on_change: Callable[[LaunchState], None] | None,
    state_dir: Path | None,
) -> Iterator[Session]:
    with planned_launch(settings, model=model, state_dir=state_dir) as planned:
        make_log_directory(planned.log_dir)
        session = Session(
            planned.topology,
            ports=planned.ports,
            log_dir=planned.log_dir,
            ready_timeout=ready_timeout,
            require_hma=settings.require_hma,
            on_change=on_change,
        )
        try:
            session.run_until_ready()
            yield session
        finally:
            session.close()
