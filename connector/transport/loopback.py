"""A data plane within one process that really copies bytes, for tests and rehearsals without NIXL.

Peers find each other through a registry of live arenas, so a peer that has closed cannot be read any more.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from collections.abc import Sequence

from connector.errors import TransportError
from connector.plan.geometry import Region, Rows, Strip
from connector.transport.base import Progress, Telemetry

_arenas: dict[bytes, tuple[Region, ...]] = {}


class LoopbackTransport:
    """Copies pages from address to address. All regions must lie in this process."""

    kind = "loopback"
    memory = "DRAM"

    def __init__(self) -> None:
        self._id = uuid.uuid4().bytes

    def register(self, regions: Sequence[Region]) -> bytes:
        _arenas[self._id] = tuple(regions)
        return self._id

    def connect(self, connection_data: bytes, local: Sequence[Strip], remote: Sequence[Strip]) -> LoopbackConnection:
        arena = _arenas.get(connection_data)
        if arena is None or not all(_lies_in(strip, arena) for strip in remote):
            raise TransportError("No live arena holds these strips.")
        return LoopbackConnection(connection_data, _addresses(local), _addresses(remote))

    def close(self) -> None:
        _arenas.pop(self._id, None)


class LoopbackConnection:
    """A peer arena in the same process."""

    def __init__(self, peer: bytes, ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
        self._peer, self._ours, self._theirs = peer, ours, theirs

    def read(self, local: Rows, remote: Rows) -> LoopbackRead:
        if self._peer not in _arenas or not self._theirs:
            raise TransportError("The peer's arena is gone, or the connection is closed.")
        started = time.perf_counter()
        num_bytes = 0
        for ours, theirs in zip(local.tolist(), remote.tolist(), strict=True):
            (target, length), (source, their_length) = self._ours[ours], self._theirs[theirs]
            if length != their_length:
                raise TransportError("Two pages of different sizes were paired.", ours=length, theirs=their_length)
            ctypes.memmove(target, source, length)
            num_bytes += length
        return LoopbackRead(num_bytes, len(local), time.perf_counter() - started)

    def close(self) -> None:
        self._theirs = []


class LoopbackRead:
    """A copy that is done when it is posted."""

    def __init__(self, num_bytes: int, descriptors: int, seconds: float) -> None:
        self._telemetry = Telemetry(
            num_bytes=num_bytes, descriptors=descriptors, post_seconds=seconds, transfer_seconds=seconds
        )

    def poll(self) -> Progress:
        return Progress.DONE

    def telemetry(self) -> Telemetry:
        return self._telemetry

    def close(self) -> bool:
        return True


def _addresses(strips: Sequence[Strip]) -> list[tuple[int, int]]:
    """(address, bytes) of every row, strip by strip: the numbering of `plan.Join`."""
    return [(strip.base + row * strip.stride, strip.num_bytes) for strip in strips for row in range(strip.count)]


def _lies_in(strip: Strip, arena: Sequence[Region]) -> bool:
    end = strip.base + (strip.count - 1) * strip.stride + strip.num_bytes
    return any(region.base <= strip.base and end <= region.base + region.extent for region in arena)
