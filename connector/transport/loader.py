"""D's loads: the plan's parts posted, polled, retried and judged. No vLLM in here.

A load is reported exactly once, after every one of its reads has ended. It succeeded only if every part is done, the
transport moved exactly the plan's bytes, and the claim was still good when that had been seen.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from connector.control.clock import Clock, lease_clock
from connector.errors import ConfigError, HmaError, TransportError
from connector.plan.build import Descriptors, Pairs, descriptors
from connector.plan.geometry import Geometry, Indices
from connector.plan.join import Join, join
from connector.transport.base import Connection, Progress, Read, Telemetry, Transport

logger = logging.getLogger("vllm.hma.loads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One request's hand-over. pairs: for each group. valid_until: end of the claim, lease clock."""

    request_id: str
    epoch: str
    pairs: tuple[Pairs, ...]
    valid_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """What makes a validated peer readable: its transport's connection data and its geometry."""

    connection: bytes
    geometry: Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a load ended. reason: empty when it succeeded, else a label: `transfer`, `lease`, `bytes`, `plan`,
    `cancelled`. bytes and descriptors: as planned (before merging), and as the transport says it moved and posted;
    runs_planned: what the posted ones should be.
    post_seconds: inside the transport's post calls. transfer_seconds: of the longest part, from its post to
    its end as the transport saw it.
    """

    request_id: str
    reason: str
    bytes_planned: int = 0
    bytes_moved: int = 0
    descriptors_planned: int = 0
    runs_planned: int = 0
    descriptors_posted: int = 0
    retries: int = 0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reason


@dataclass(slots=True)
class _Part:
    local: Indices
    remote: Indices
    read: Read | None = None
    done: Telemetry | None = None
    attempts: int = 0
    failed: bool = False


@dataclass(slots=True)
class _Running:
    load: Load
    rows: Descriptors
    parts: list[_Part]
    valid_until: float
    reason: str = ""
    retries: int = 0


class Loader:
    """All loads of one rank. Single-threaded: the worker's step calls it.

    max_runs: runs in a part. max_attempts: posts of one part, the first among them.
    """

    def __init__(
        self,
        transport: Transport,
        geometry: Geometry,
        *,
        max_runs: int = 1024,
        max_attempts: int = 3,
        clock: Clock = lease_clock,
    ) -> None:
        self._transport, self._geometry = transport, geometry
        self._max_runs, self._max_attempts, self._clock = max_runs, max_attempts, clock
        self._peers: dict[str, tuple[Connection, Join]] = {}
        self._leaving: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._ended: list[Outcome] = []

    def __len__(self) -> int:
        return len(self._running)

    def connect(self, epoch: str, memory: PeerMemory) -> None:
        """Make a peer readable. A peer that the transport refuses stays unknown: loads from it fail as `transfer`."""
        self._leaving.discard(epoch)
        if epoch in self._peers:
            return
        try:
            joined = join(self._geometry, [memory.geometry])[0]
            connection = self._transport.connect(memory.connection, joined.local_strips, joined.remote_strips)
            self._peers[epoch] = (connection, joined)
        except (ConfigError, TransportError) as error:
            logger.error("Prefill engine %s cannot be connected: %s", epoch, error)

    def forget(self, epoch: str) -> None:
        """Drop a peer once none of its reads is under way."""
        if epoch in self._peers:
            self._leaving.add(epoch)
            self._drop_leaving()

    def start(self, load: Load) -> None:
        """Post all parts of a load. Whatever goes wrong becomes its outcome."""
        if load.epoch not in self._peers:
            self._ended.append(Outcome(request_id=load.request_id, reason="transfer"))
            return
        connection, joined = self._peers[load.epoch]
        try:
            rows = descriptors(load.pairs, joined)
        except (HmaError, ValueError, IndexError) as error:
            logger.error("The plan of request %s cannot be built: %s", load.request_id, error)
            self._ended.append(Outcome(request_id=load.request_id, reason="plan"))
            return
        parts = [_Part(local, remote_rows) for local, remote_rows in rows.parts(self._max_runs)]
        running = _Running(load, rows, parts, load.valid_until)
        self._running[load.request_id] = running
        for part in parts:
            self._post(running, part, connection)

    def extend(self, request_id: str, valid_until: float) -> None:
        """The claim of a load has been renewed, or lost (0)."""
        if (running := self._running.get(request_id)) is not None:
            running.valid_until = valid_until

    def cancel(self, request_id: str) -> None:
        """The request has left: post nothing more, wait for what is under way."""
        if (running := self._running.get(request_id)) is not None:
            running.reason = running.reason or "cancelled"

    def poll(self) -> list[Outcome]:
        """Look at every read; returns the loads that ended since the last call."""
        now = self._clock()
        for running in list(self._running.values()):
            if now >= running.valid_until:
                running.reason = running.reason or "lease"
            if self._all_ended(running):
                del self._running[running.load.request_id]
                self._ended.append(self._judge(running))
        self._drop_leaving()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End every read, then forget every peer. Reads that cannot be ended are left to the transport's own end."""
        for running in self._running.values():
            for part in running.parts:
                if part.read is not None:
                    part.read.close()
        self._running.clear()
        for connection, _ in self._peers.values():
            connection.close()
        self._peers.clear()

    def _post(self, running: _Running, part: _Part, connection: Connection) -> None:
        part.attempts += 1
        part.failed = False
        try:
            part.read = connection.read(part.local, part.remote)
        except TransportError as error:
            logger.warning("A read of request %s was not posted: %s", running.load.request_id, error)
            part.read, part.failed = None, True

    def _all_ended(self, running: _Running) -> bool:
        """Advance every part. True when nothing is being written any more and nothing will be posted again."""
        for part in running.parts:
            if part.read is not None:
                self._look(running, part)
            if part.failed and not running.reason:
                self._retry(running, part)
        given_up = bool(running.reason)
        return all(part.read is None and (given_up or part.done is not None) for part in running.parts)

    def _look(self, running: _Running, part: _Part) -> None:
        assert part.read is not None
        progress = part.read.poll()
        if progress is Progress.DONE:
            part.done = part.read.telemetry()
        elif progress is Progress.FAILED:
            part.failed = True
        elif not running.reason:
            return
        # Ended, or no longer wanted: a pending read is cancelled, and awaited when it cannot be.
        if part.read.close():
            part.read = None
            part.failed = part.done is None

    def _retry(self, running: _Running, part: _Part) -> None:
        peer = self._peers.get(running.load.epoch)
        if part.attempts >= self._max_attempts or peer is None or running.load.epoch in self._leaving:
            running.reason = "transfer"
        else:
            running.retries += 1
            self._post(running, part, peer[0])

    def _judge(self, running: _Running) -> Outcome:
        done = [part.done for part in running.parts if part.done is not None]
        moved = sum(telemetry.num_bytes for telemetry in done)
        reason = running.reason
        if not reason and self._clock() >= running.valid_until:
            reason = "lease"
        if not reason and moved != running.rows.num_bytes:
            logger.error(
                "Request %s: %d bytes planned, %d moved", running.load.request_id, running.rows.num_bytes, moved
            )
            reason = "bytes"
        return Outcome(
            request_id=running.load.request_id,
            reason=reason,
            bytes_planned=running.rows.num_bytes,
            bytes_moved=moved,
            descriptors_planned=running.rows.num_pages,
            runs_planned=running.rows.runs,
            descriptors_posted=sum(telemetry.descriptors for telemetry in done),
            retries=running.retries,
            post_seconds=sum(telemetry.post_seconds for telemetry in done),
            transfer_seconds=max((telemetry.transfer_seconds for telemetry in done), default=0.0),
        )

    def _drop_leaving(self) -> None:
        busy = {running.load.epoch for running in self._running.values()}
        for epoch in self._leaving - busy:
            connection, _ = self._peers.pop(epoch)
            connection.close()
        self._leaving &= busy
