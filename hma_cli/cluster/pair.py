"""A running pair or a running engine for other code: `hma verify`, benchmarks and tests.

Both are context managers: what they start is ready when the body begins and gone when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    probe: Any


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
) -> Iterator[Pair]:
    """One prefill and one decode server and a router, ready and proven; raises an HmaError otherwise."""
    raise NotImplementedError
    yield


@contextmanager
def running_engine(
    *,
    model: str | None = None,
    block_size: int | None = None,
    max_model_len: int | None = None,
    args: tuple[str, ...] = (),
    kv_space_gib: float | None = None,
    ready_timeout: float = 300.0,
) -> Iterator[Engine]:
    """One plain vLLM server with the pair's settings for block size, length and KV space."""
    raise NotImplementedError
    yield
