"""The seam of the data plane: register once, connect to a peer, read pages, poll.

Rows are numbered strip by strip, as `plan.Join` numbers them, so that no caller computes an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from connector.plan.geometry import Region, Rows, Strip


class Progress(StrEnum):
    """Where a posted read stands. `done` and `failed` are final: nothing is written any more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What the transport itself measured of one finished read."""

    num_bytes: int
    descriptors: int
    post_seconds: float
    transfer_seconds: float


class Read(Protocol):
    """One posted read. `close` must be called once it has ended."""

    def poll(self) -> Progress: ...

    def telemetry(self) -> Telemetry:
        """Figures of a read that is done."""

    def close(self) -> bool:
        """Free what the read holds. False when it is still under way and could not be cancelled: call again later."""


class Connection(Protocol):
    """A peer whose pages can be read."""

    def read(self, local: Rows, remote: Rows) -> Read:
        """Post one read of row `remote[i]` into row `local[i]`. TransportError when it cannot be posted."""

    def close(self) -> None:
        """Forget the peer. Reads must have ended; another one is refused with a TransportError. May be called twice."""


class Transport(Protocol):
    """One engine rank's end of the data plane.

    kind: its name in descriptions, peers must have the same. memory: what it reads into, `DRAM` or `VRAM`.
    """

    kind: str
    memory: str

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register the memory of all regions, once. Returns the connection data that a peer needs."""

    def connect(self, connection_data: bytes, local: Sequence[Strip], remote: Sequence[Strip]) -> Connection:
        """Make a validated peer readable: strips of our memory and, strip by strip, of the peer's.

        TransportError when the peer's data is of no use.
        """

    def close(self) -> None:
        """Deregister. Reads must have ended."""
