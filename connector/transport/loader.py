"""D's loads: the plan's parts posted, polled, retried and judged. No vLLM in here.

A load is reported exactly once, after every one of its reads has ended. A part that fails is posted again, after a
pause and where possible over a new connection, as long as the claim is good; the other parts are left alone. A load
succeeded only if every part is done, the transport moved exactly the plan's bytes, the pages are those that P published
(where it did), and the claim was still good when all that had been seen.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from connector.control.clock import Clock, lease_clock
from connector.errors import ConfigError, HmaError, TransportError
from connector.plan.build import Descriptors, Pairs, descriptors
from connector.plan.geometry import Geometry, Rows
from connector.plan.join import Join, join
from connector.transport.base import Connection, Transport
from connector.transport.digests import differing_rows
from connector.transport.parts import Failure, Part, Recovery

logger = logging.getLogger("vllm.hma.loads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One request's hand-over. pairs: for each group. valid_until: end of the claim, lease clock. digests: for each
    group those of its pairs' pages, empty where pages are not verified. deadline: when the load counts as failed, lease
    clock; the claim may be renewed, the deadline stays."""

    request_id: str
    epoch: str
    pairs: tuple[Pairs, ...]
    valid_until: float
    digests: tuple[bytes, ...] = ()
    deadline: float = math.inf

    def too_late(self, now: float, valid_until: float) -> str:
        """Why it must not go on, or an empty text. Its own deadline tells more than the lease that ends after it."""
        if now >= self.deadline:
            return "load_timeout"
        return "lease" if now >= valid_until else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What makes one rank of a peer readable: its transport's connection data and its geometry."""

    connection: bytes
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A validated peer: all of its ranks, in order."""

    ranks: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a load ended. reason: empty when it succeeded, else a label: `transfer`, `digest`, `lease`, `load_timeout`,
    `bytes`, `plan`, `cancelled`. bytes and descriptors: as planned (before merging), and as the transport says it moved
    and posted; runs_planned: what the posted ones should be. failures: posts that failed, by kind; each was followed by
    another one unless the load failed. retries: parts that were posted again, and rows_again: their rows.
    bytes_again: bytes that replaced wrong pages.
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
    failures: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    rows_again: int = 0
    bytes_again: int = 0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reason


@dataclass(slots=True)
class _Running:
    """A load under way. rows: for each rank that is read from. failures: of single posts, by name. checked: times that
    its pages' digests were compared."""

    load: Load
    rows: tuple[Descriptors, ...]
    parts: list[Part]
    valid_until: float
    reason: str = ""
    retries: int = 0
    rows_again: int = 0
    checked: int = 0
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Source:
    """A rank of a peer that this rank reads from."""

    memory: RankMemory
    join: Join
    connection: Connection


@dataclass(frozen=True, slots=True)
class _Peer:
    """Every rank of P that holds what this rank needs: one where both sides are divided alike."""

    sources: tuple[_Source, ...]

    def close(self) -> None:
        for source in self.sources:
            source.connection.close()


class Loader:
    """All loads of one rank. Single-threaded: the worker's step calls it.

    max_runs: runs in a part. rank, ranks: this one's number and how many D has.
    """

    def __init__(
        self,
        transport: Transport,
        geometry: Geometry,
        *,
        max_runs: int = 1024,
        rank: int = 0,
        ranks: int = 1,
        recovery: Recovery | None = None,
        clock: Clock = lease_clock,
    ) -> None:
        self._transport, self._geometry = transport, geometry
        self._max_runs, self._recovery, self._clock = max_runs, recovery or Recovery(), clock
        self._rank, self._ranks = rank, ranks
        self._peers: dict[str, _Peer] = {}
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
        sources: list[_Source] = []
        try:
            geometries = [rank.geometry for rank in memory.ranks]
            for number, joined in join(self._geometry, geometries, rank=self._rank, ranks=self._ranks).items():
                rank = memory.ranks[number]
                sources.append(_Source(rank, joined, self._open(rank, joined)))
            self._peers[epoch] = _Peer(tuple(sources))
        except (ConfigError, TransportError) as error:
            logger.error("Prefill engine %s cannot be connected: %s", epoch, error)
            _Peer(tuple(sources)).close()

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
        peer = self._peers[load.epoch]
        try:
            rows = tuple(descriptors(load.pairs, source.join) for source in peer.sources)
        except (HmaError, ValueError, IndexError) as error:
            logger.error("The plan of request %s cannot be built: %s", load.request_id, error)
            self._ended.append(Outcome(request_id=load.request_id, reason="plan"))
            return
        if reason := load.too_late(self._clock(), load.valid_until):
            logger.warning("Request %s: its load came too late to be started (%s)", load.request_id, reason)
            self._ended.append(Outcome(request_id=load.request_id, reason=reason))
            return
        parts = [
            Part(local, remote, _num_bytes(source.join, local), source=number)
            for number, (source, part_rows) in enumerate(zip(peer.sources, rows, strict=True))
            for local, remote in part_rows.parts(self._max_runs)
        ]
        running = _Running(load, rows, parts, load.valid_until)
        self._running[load.request_id] = running
        for part in parts:
            self._post(running, part, peer)

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
            running.reason = running.reason or self._too_late(running, now)
            if self._advance(running, now):
                del self._running[running.load.request_id]
                self._ended.append(self._judge(running))
        self._drop_leaving()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End every read, then forget every peer."""
        for running in self._running.values():
            for part in running.parts:
                part.stop()
        self._running.clear()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _open(self, memory: RankMemory, joined: Join) -> Connection:
        return self._transport.connect(memory.connection, joined.local_strips, joined.remote_strips)

    def _post(self, running: _Running, part: Part, peer: _Peer) -> None:
        part.post(peer.sources[part.source].connection, self._clock(), self._recovery)
        self._note(running, part)

    def _note(self, running: _Running, part: Part) -> None:
        if part.failure is not None:
            running.failures[part.failure] += 1
            logger.warning(
                "Request %s: a part of %d rows %s (post %d) %s",
                running.load.request_id,
                len(part.local),
                part.failure,
                part.attempts,
                part.detail,
            )

    def _advance(self, running: _Running, now: float) -> bool:
        """Look at every part and repeat what failed. True when nothing is written any more and nothing will be."""
        for part in running.parts:
            was_quiet = part.is_quiet
            part.look(now, self._recovery, wanted=not running.reason)
            if part.is_quiet and not was_quiet:
                self._note(running, part)
        for part in running.parts:
            if part.failure is not None and not running.reason and now >= part.retry_at:
                self._retry(running, part)
        if not all(part.is_quiet for part in running.parts):
            return False
        if running.reason:
            return True
        return all(part.done is not None for part in running.parts) and self._is_intact(running, now)

    def _retry(self, running: _Running, part: Part) -> None:
        peer = self._peers.get(running.load.epoch)
        if part.attempts >= self._recovery.max_attempts or peer is None or running.load.epoch in self._leaving:
            running.reason = "digest" if part.failure is Failure.DIGEST else "transfer"
            return
        source = peer.sources[part.source]
        if part.connection is source.connection:
            self._renew(running.load.epoch, part.source, source)
        running.retries += 1
        running.rows_again += len(part.local)
        self._post(running, part, peer)

    def _renew(self, epoch: str, number: int, source: _Source) -> None:
        """Connect to a rank anew after a failure, unless other reads use the connection."""
        parts = [p for running in self._running.values() if running.load.epoch == epoch for p in running.parts]
        if not all(part.is_quiet for part in parts if part.source == number):
            return
        try:
            source.connection.close()
            source.connection = self._open(source.memory, source.join)
        except TransportError as error:
            logger.warning("Prefill engine %s cannot be connected anew: %s", epoch, error)

    def _is_intact(self, running: _Running, now: float) -> bool:
        """Compare the digests, where there are any. Pages that differ become parts of their own, and move again."""
        if not running.load.digests:
            return True
        peer = self._peers.get(running.load.epoch)
        if peer is None:
            running.reason = "transfer"
            return True
        if len(peer.sources) != 1:
            running.reason = "digest"  # settings refuse to verify pages of several ranks
            return True
        joined = peer.sources[0].join
        try:
            local, remote = differing_rows(joined, running.load.pairs, running.load.digests)
        except ConfigError as error:
            logger.error("Request %s: %s", running.load.request_id, error)
            running.reason = "digest"
            return True
        if not len(local):
            return True
        running.checked += 1
        part = Part(
            local,
            remote,
            _num_bytes(joined, local),
            is_repair=True,
            attempts=running.checked,
            failure=Failure.DIGEST,
            retry_at=now + self._recovery.pause(running.checked),
        )
        self._note(running, part)
        running.parts.append(part)
        return False

    def _judge(self, running: _Running) -> Outcome:
        ended = [(part, part.done) for part in running.parts if part.done is not None]
        done = [telemetry for _, telemetry in ended]
        moved = sum(telemetry.num_bytes for part, telemetry in ended if not part.is_repair)
        planned = sum(rows.num_bytes for rows in running.rows)
        reason = running.reason
        reason = reason or self._too_late(running, self._clock())
        if not reason and any(telemetry.num_bytes != part.num_bytes for part, telemetry in ended):
            logger.error("Request %s: %d bytes planned, %d moved", running.load.request_id, planned, moved)
            reason = "bytes"
        return Outcome(
            request_id=running.load.request_id,
            reason=reason,
            bytes_planned=planned,
            bytes_moved=moved,
            descriptors_planned=sum(rows.num_pages for rows in running.rows),
            runs_planned=sum(rows.runs for rows in running.rows),
            descriptors_posted=sum(telemetry.descriptors for telemetry in done),
            failures=dict(running.failures),
            retries=running.retries,
            rows_again=running.rows_again,
            bytes_again=sum(telemetry.num_bytes for part, telemetry in ended if part.is_repair),
            post_seconds=sum(telemetry.post_seconds for telemetry in done),
            transfer_seconds=max((telemetry.transfer_seconds for telemetry in done), default=0.0),
        )

    def _too_late(self, running: _Running, now: float) -> str:
        reason = running.load.too_late(now, running.valid_until)
        if reason == "load_timeout":
            logger.warning("Request %s: its load has taken too long and ends", running.load.request_id)
        return reason

    def _drop_leaving(self) -> None:
        busy = {running.load.epoch for running in self._running.values()}
        for epoch in self._leaving - busy:
            self._peers.pop(epoch).close()
        self._leaving &= busy


def _num_bytes(joined: Join, local: Rows) -> int:
    """Bytes of these rows."""
    sizes = np.array([strip.num_bytes for strip in joined.local_strips], np.int64)
    return int(sizes[np.asarray(local) // joined.local.num_blocks].sum())
