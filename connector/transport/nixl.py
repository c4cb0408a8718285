"""NIXL as the data plane: one agent a rank, pages prepared once, reads posted by index."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np

from connector.errors import StackError, TransportError
from connector.plan.geometry import Region, Rows, Strip
from connector.transport.base import Progress, Telemetry

PROGRESS_DELAY_US = 10_000
_STATES = {"DONE": Progress.DONE, "PROC": Progress.PENDING}


class NixlTransport:
    """`nixl_agent` with a progress thread that sleeps until UCX wakes it.

    NIXL's Python agent fixes that thread's delay at 0, which spins a whole core in every idle server; see
    `quiet_agent`. memory: `DRAM` or `VRAM`, in NIXL's words. backends: NIXL plugins, UCX unless told otherwise.
    """

    kind = "nixl"

    def __init__(self, memory: str, backends: Sequence[str] = ("UCX",)) -> None:
        self.memory = memory
        self._backends = list(backends)
        self._agent = quiet_agent(f"hma-{uuid.uuid4().hex}", self._backends)
        self._registered: object | None = None
        self._prepared: dict[tuple[Strip, ...], object] = {}
        self._connections: set[NixlConnection] = set()

    def register(self, regions: Sequence[Region]) -> bytes:
        assert self._registered is None, "memory is registered once"
        rows = [(base, length, device, "") for base, length, device in united(regions)]
        try:
            self._registered = self._agent.register_memory(rows, self.memory, self._backends)
            data: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransportError(f"NIXL cannot register the KV cache: {error}.") from error
        return data

    def connect(self, connection_data: bytes, local: Sequence[Strip], remote: Sequence[Strip]) -> NixlConnection:
        assert self._registered is not None, "connect comes after register"
        ours = self._own_rows(tuple(local))
        try:
            name = self._agent.add_remote_agent(connection_data)
            name = name.decode() if isinstance(name, bytes) else name
        except Exception as error:
            raise TransportError(f"NIXL does not accept the peer's agent: {error}.") from error
        try:
            theirs = self._agent.prep_xfer_dlist(name, _rows(remote), self.memory, self._backends)
        except Exception as error:
            self._agent.remove_remote_agent(name)
            raise TransportError(f"NIXL does not accept the peer's regions: {error}.") from error
        connection = NixlConnection(self, name, ours, theirs)
        self._connections.add(connection)
        return connection

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        for handle in self._prepared.values():
            self._agent.release_dlist_handle(handle)
        self._prepared.clear()
        if self._registered is not None:
            self._agent.deregister_memory(self._registered, self._backends)
            self._registered = None

    def _own_rows(self, strips: tuple[Strip, ...]) -> object:
        """Our side's prepared rows, shared by all peers that are joined alike."""
        if strips not in self._prepared:
            try:
                rows = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _rows(strips), self.memory, self._backends)
            except Exception as error:
                raise TransportError(f"NIXL cannot prepare the KV cache: {error}.") from error
            self._prepared[strips] = rows
        return self._prepared[strips]


class NixlConnection:
    """A remote agent with the prepared rows of both sides."""

    def __init__(self, transport: NixlTransport, name: str, ours: object, theirs: object) -> None:
        self._transport, self._name, self._ours, self._theirs = transport, name, ours, theirs

    def read(self, local: Rows, remote: Rows) -> NixlRead:
        if self not in self._transport._connections:
            raise TransportError("The connection is closed.")  # NIXL would read through a freed handle
        agent, backends = self._transport._agent, self._transport._backends
        try:
            handle = agent.make_prepped_xfer("READ", self._ours, local, self._theirs, remote, b"", backends)
        except Exception as error:
            raise TransportError(f"NIXL cannot prepare a read of {len(local)} pages: {error}.") from error
        read = NixlRead(agent, handle)
        read.post()
        return read

    def close(self) -> None:
        if self in self._transport._connections:
            self._transport._connections.discard(self)
            self._transport._agent.release_dlist_handle(self._theirs)
            self._transport._agent.remove_remote_agent(self._name)


class NixlRead:
    """One transfer handle."""

    def __init__(self, agent: object, handle: object) -> None:
        self._agent, self._handle = agent, handle
        self._state = Progress.PENDING

    def post(self) -> None:
        self._update(self._agent.transfer)  # type: ignore[attr-defined]

    def poll(self) -> Progress:
        if self._state is Progress.PENDING:
            self._update(self._agent.check_xfer_state)  # type: ignore[attr-defined]
        return self._state

    def telemetry(self) -> Telemetry:
        figures = self._agent.get_xfer_telemetry(self._handle)  # type: ignore[attr-defined]
        return Telemetry(
            num_bytes=figures.totalBytes,
            descriptors=figures.descCount,
            post_seconds=figures.postDuration / 1e6,
            transfer_seconds=figures.xferDuration / 1e6,
        )

    def close(self) -> bool:
        try:
            self._agent.release_xfer_handle(self._handle)  # type: ignore[attr-defined]
        except Exception:
            return self._state is not Progress.PENDING
        return True

    def _update(self, ask: object) -> None:
        try:
            self._state = _STATES.get(ask(self._handle), Progress.FAILED)  # type: ignore[operator]
        except Exception:
            self._state = Progress.FAILED


def quiet_agent(name: str, backends: Sequence[str], delay_us: int = PROGRESS_DELAY_US):  # type: ignore[no-untyped-def]
    """A `nixl_agent` whose progress thread waits for UCX's events, `delay_us` microseconds at most.

    A read does not wait for the delay: its events wake the thread. The delay is what an idle server pays for.

    `nixl_agent` offers no setting for the delay, so the agent is made without a backend and its inner agent is replaced
    by one with the delay before any backend exists.
    """
    try:
        from nixl._api import nixl_agent, nixl_agent_config
        from nixl._bindings import nixlAgent, nixlAgentConfig
    except ImportError as error:
        raise StackError(
            f"NIXL cannot be imported: {error}.", remedy="pip install 'hma[cpu]' or 'hma[gpu]' (both halves of nixl)"
        ) from error
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = nixlAgentConfig()
    config.useProgThread, config.pthrDelay, config.captureTelemetry = True, delay_us, True
    agent.agent = nixlAgent(name, config)
    for backend in backends:
        if backend not in agent.get_plugin_list():
            raise StackError(f"NIXL has no backend {backend}.", remedy=f"It has: {', '.join(agent.get_plugin_list())}.")
        agent.create_backend(backend, {})
    return agent


def united(regions: Sequence[Region]) -> list[tuple[int, int, int]]:
    """(base, bytes, device) of the memory that regions cover; regions that overlap become one.

    Caches whose blocks lie outermost interleave, and groups with pages of different sizes overlay each other.
    """
    found: list[tuple[int, int, int]] = []
    for region in sorted(regions, key=lambda region: (region.device, region.base)):
        base, length, device = found[-1] if found else (0, 0, -1)
        if device == region.device and region.base < base + length:
            found[-1] = (base, max(length, region.base + region.extent - base), device)
        else:
            found.append((region.base, region.extent, region.device))
    return found


def _rows(strips: Sequence[Strip]) -> np.ndarray:
    """Strips as NIXL's strided rows (address, bytes, device, stride, count)."""
    return np.array([(s.base, s.num_bytes, s.device, s.stride, s.count) for s in strips], dtype=np.uint64)
