"""P's side: what the control server answers. Offers in, grants out, freed requests for the scheduler."""

from __future__ import annotations

import threading
from collections import Counter

from connector.control.clock import Clock, lease_clock
from connector.wire.compare import fingerprint
from connector.wire.messages import (
    Claim,
    Decline,
    Describe,
    Described,
    EngineDescription,
    Granted,
    NotYet,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
)
from connector.wire.offers import Offer, OfferTable, Refusal


class Outbound:
    """Shared by the engine's scheduler thread and the control server's thread; one lock guards the table."""

    def __init__(self, engine: EngineDescription, *, lease: float, clock: Clock = lease_clock) -> None:
        self._engine, self._fingerprint, self._clock = engine, fingerprint(engine), clock
        self._lock = threading.Lock()
        self._table = OfferTable(epoch=engine.epoch, lease=lease)
        self._granted = 0
        self._refused: Counter[str] = Counter()

    def offer(self, offer: Offer) -> None:
        """Record an offer; its blocks stay until `take_freed` returns its id."""
        with self._lock:
            self._table.add(offer, self._clock())

    def publish(self, request_id: str, digests: tuple[bytes, ...]) -> None:
        """The worker has computed the digests of an offer's pages; claims of it are answered from now on."""
        with self._lock:
            self._table.publish(request_id, digests)

    def take_freed(self) -> list[str]:
        """Requests whose blocks the engine may free now, after expiring what is over."""
        with self._lock:
            self._table.expire(self._clock())
            return self._table.take_freed()

    def take_counts(self) -> tuple[int, dict[str, int], int]:
        """Grants, refusals by reason and expired leases since the last call."""
        with self._lock:
            counts = self._granted, dict(self._refused), self._table.expired
            self._granted, self._table.expired = 0, 0
            self._refused.clear()
            return counts

    def count_refused(self, reason: str) -> None:
        """Count a frame that was refused before it became a request."""
        with self._lock:
            self._refused[reason] += 1

    @property
    def open_offers(self) -> int:
        with self._lock:
            return len(self._table)

    def handle(self, request: Request) -> Reply:
        """Answer one request. Runs on the server's thread."""
        if isinstance(request, Describe):
            return Described(engine=self._engine)
        now = self._clock()
        with self._lock:
            if isinstance(request, Claim):
                return self._claim(request, now)
            if request.epoch != self._engine.epoch:
                return Refused(reason=Refusal.EPOCH, detail="This engine has been restarted.")
            if isinstance(request, Renew):
                kept = self._table.renew(request.request_ids, request.claimant, now)
                return Renewed(request_ids=kept, valid_seconds=self._table.lease)
            if isinstance(request, Decline):
                declined = self._table.decline(request.request_id, now)
                return Released(request_ids=(request.request_id,) if declined else ())
            assert isinstance(request, Release)
            return Released(request_ids=self._table.release(request.request_ids, request.claimant, now))

    def _claim(self, claim: Claim, now: float) -> Granted | NotYet | Refused:
        reply = self._table.claim(claim, now, self._fingerprint)
        if isinstance(reply, Granted):
            self._granted += 1
        elif isinstance(reply, Refused):
            self._refused[reply.reason] += 1
        return reply
