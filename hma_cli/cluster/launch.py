"""From settings to a planned launch: looks at the machine, finds the model, reserves ports. Starts nothing."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from connector.errors import ResourceError
from hma_cli.cluster.machine import inspect_machine
from hma_cli.cluster.model import resolve_model
from hma_cli.cluster.ports import Ports
from hma_cli.cluster.sizing import Share, share_cpu, share_gpus
from hma_cli.cluster.stack import device, require_stack
from hma_cli.cluster.topology import LOOPBACK, PortPlan, Settings, Topology, build_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A topology whose ports are reserved, and the directory for its logs (not made yet)."""

    topology: Topology
    ports: Ports
    log_dir: Path


@contextmanager
def planned_launch(settings: Settings, *, model: str | None, state_dir: Path | None = None) -> Iterator[Planned]:
    """Check everything that can be checked before a start; the ports are released when the body ends.

    StackError, ModelError, ResourceError or ConfigError, in one sentence each.
    """
    with_router = settings.connector is not None
    require_stack(connector=settings.connector, router=with_router)
    machine = inspect_machine()
    target = device(machine)
    with Ports() as ports:
        port_plan = _reserve(settings, ports)
        found = resolve_model(model)
        workers = tuple(settings.workers(role) for role, _ in settings.roles)
        shares: tuple[Share, ...] = (
            share_cpu(machine, workers=workers, weight_bytes=found.weight_bytes, kv_space_gib=settings.kv_space_gib)
            if target == "cpu"
            else share_gpus(machine.gpus, workers=workers)
        )
        launch_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_NUMBERS)}"
        topology = build_topology(
            settings, model=found, shares=shares, ports=port_plan, launch_id=launch_id, python=sys.executable
        )
        yield Planned(topology=topology, ports=ports, log_dir=launches_directory(state_dir) / launch_id)


def launches_directory(state_dir: Path | None = None) -> Path:
    """Where launches keep their logs, one directory each."""
    if state_dir is None:
        import platformdirs

        state_dir = platformdirs.user_state_path("hma")
    return state_dir / "launches"


def make_log_directory(path: Path) -> None:
    """Make it. ResourceError when it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"The log directory {path} cannot be made: {error.strerror}.", remedy="Give another --state-dir."
        ) from error


def _reserve(settings: Settings, ports: Ports) -> PortPlan:
    """The asked-for port first: when it is taken, that is said before anything else happens."""
    if settings.connector is None:
        port = ports.pick() if settings.port is None else ports.take(settings.port, LOOPBACK, "server")
        return PortPlan(servers=((port, None),), router=None)
    host = settings.host
    port = ports.pick(host) if settings.port is None else ports.take(settings.port, host, "router")
    servers = tuple((ports.pick(), ports.pick()) for _ in settings.roles)
    return PortPlan(servers=servers, router=(port, ports.pick()))


_NUMBERS = itertools.count()
