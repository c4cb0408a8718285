"""D's side: one claim a request, one renewal message a peer, from the scheduler's questions to P's answers.

The scheduler thread opens, polls and ends claims; replies arrive on the client's thread. One lock guards both tables.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from connector.control.clock import Clock, lease_clock
from connector.control.peers import AllowedPeers, Endpoint, Peer
from connector.errors import HmaError, PeerUnreachable, ProtocolError
from connector.plan.kinds import blocks_covering
from connector.wire.claims import Event, InboundClaim, State
from connector.wire.compare import fingerprint
from connector.wire.handle import Handle
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
    Renew,
    Renewed,
    Reply,
    Request,
)
from connector.wire.offers import Refusal

logger = logging.getLogger("vllm.hma.claims")

RELEASE_TIMEOUT = 5.0
_STUCK_LOOK = 1.0  # seconds between looks at whether a stuck engine steps again
FIRST_AWAY, MAX_AWAY = 0.5, 5.0  # seconds that a silent peer is left alone
MAX_PEERS = 4096


@dataclass(frozen=True, slots=True)
class _Away:
    """A peer that does not answer: how often in a row, and until when nobody asks it."""

    silences: int
    until: float


class Rpc(Protocol):
    """What this side needs of `ControlClient`."""

    def ask(
        self,
        endpoint: Endpoint,
        message: Request,
        *,
        timeout: float,
        on_reply: Callable[[Reply | HmaError, float], None],
    ) -> None: ...

    def drop(self, endpoint: Endpoint) -> None: ...


class Inbound:
    """All claims and peers of one decode engine.

    claim_timeout: seconds from a request's arrival until an unanswered claim counts as refused. load_timeout: seconds
    that the claim of a load is renewed for, and that claims are renewed for an engine that does not step: a worker that
    has not reported by then may never do so.
    """

    def __init__(
        self,
        engine: EngineDescription,
        *,
        claim_timeout: float,
        load_timeout: float,
        allowed: AllowedPeers,
        clock: Clock = lease_clock,
    ) -> None:
        self._engine, self._fingerprint = engine, fingerprint(engine)
        self._claim_timeout, self._load_timeout = claim_timeout, load_timeout
        self._allowed, self._clock = allowed, clock
        self._lock = threading.RLock()
        self._claims: dict[str, InboundClaim] = {}
        self._peers: dict[Endpoint, Peer] = {}
        self._asking: dict[Endpoint, list[InboundClaim]] = {}
        self._renew_at: dict[Endpoint, float] = {}
        self._away: dict[Endpoint, _Away] = {}
        self._early: list[tuple[float, Peer, InboundClaim]] = []  # claims to ask again, and when
        self._dropped: list[str] = []
        self._stepped_at, self._told_stuck = clock(), False
        self._rpc: Rpc | None = None

    def attach(self, rpc: Rpc) -> None:
        """Give this side its client; claims can be opened from now on."""
        self._rpc = rpc

    # Called by the scheduler -------------------------------------------------------------------------------------

    def open(self, request_id: str, params: Mapping[str, Any], digest: bytes, num_tokens: int) -> InboundClaim:
        """A request with a handle has arrived: ask P for its blocks."""
        with self._lock:
            self._stepped_at = self._clock()
            deadline = self._stepped_at + self._claim_timeout
            try:
                handle = Handle.from_params(params)
            except ProtocolError as error:
                nowhere = Handle(engine_id="-", epoch="-", request_id="-", host="-", port=1)
                claim = InboundClaim(request_id, nowhere, digest, num_tokens, deadline)
                claim.refused("malformed", error.message)
                self._claims[request_id] = claim
                return claim
            claim = InboundClaim(request_id, handle, digest, num_tokens, deadline)
            self._claims[request_id] = claim
            endpoint = self._endpoint(handle)
            if endpoint is None:
                claim.refused("not_allowed", f"{handle.host} is not among the allowed peers")
            elif (away := self._away.get(endpoint)) is not None and self._clock() < away.until:
                claim.refused("unreachable", f"{endpoint[0]}:{endpoint[1]} has not answered {away.silences} times")
            elif (peer := self._peers.get(endpoint)) is not None and peer.epoch == handle.epoch:
                self._claim(peer, claim)
            else:
                self._ask_who(endpoint, claim)
            return claim

    def decline(self, params: Mapping[str, Any]) -> None:
        """A request with a handle has been refused before its prompt was seen: P need not keep the offer any longer."""
        with self._lock:
            try:
                handle = Handle.from_params(params)
            except ProtocolError:
                return
            endpoint = self._endpoint(handle)
            if endpoint is not None:
                message = Decline(epoch=handle.epoch, request_id=handle.request_id)
                self._ask(endpoint, message, lambda _reply, _at: None, RELEASE_TIMEOUT)

    def poll(self, request_id: str) -> InboundClaim | None:
        """The claim of a request as of now, or None when the request has none (any more)."""
        with self._lock:
            claim = self._claims.get(request_id)
            if claim is None:
                return None
            claim.tick(self._clock())
            return claim

    def peer_of(self, claim: InboundClaim) -> Peer | None:
        """The peer that granted a claim; None when it has been replaced since."""
        with self._lock:
            endpoint = self._endpoint(claim.handle)
            peer = self._peers.get(endpoint) if endpoint is not None else None
            return peer if peer is not None and peer.epoch == claim.handle.epoch else None

    def move(self, request_id: str, event: Event) -> bool:
        """Apply a scheduler event. What reaches its end gives its claim back to P."""
        with self._lock:
            claim = self._claims.get(request_id)
            if claim is None:
                return False
            if claim.state is State.LOADING and event is Event.CANCEL:
                claim.cancelled = True
                return True
            moved = claim.move(event)
            if moved and event is Event.LOAD:
                claim.deadline = self.load_deadline()
            if claim.state is State.OVER:
                del self._claims[request_id]
                self._release(claim)
            return moved

    def load_deadline(self) -> float:
        """When a load that starts now counts as failed, lease clock."""
        return self._clock() + self._load_timeout

    def leases(self) -> dict[str, float]:
        """Request id to `valid_until` of every load under way. Asked in each step: the engine is alive."""
        with self._lock:
            self._stepped_at = self._clock()
            return {rid: c.valid_until for rid, c in self._claims.items() if c.state is State.LOADING}

    def waiting(self) -> int:
        """Requests that wait for an answer, for blocks, or for their load."""
        with self._lock:
            return len(self._claims)

    def take_dropped(self) -> list[str]:
        """Epochs of peers that are gone, each once: the worker forgets them."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def close(self) -> None:
        """Give back every claim, as far as P can still be reached."""
        with self._lock:
            claims, self._claims = list(self._claims.values()), {}
            for claim in claims:
                self._release(claim)

    # Called by the client's thread -------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Renew what is due, one message a peer, and ask again what was asked too early.

        The claim of a load that is past its deadline is not renewed, and none is while the engine does not step: P has
        its blocks back one lease later at most, even when D's worker or its whole engine is stuck.

        Returns when to be called again, None when there is nothing to wait for.
        """
        with self._lock:
            early, self._early = self._early, []
            for entry in early:
                if entry[0] > now:
                    self._early.append(entry)
                elif entry[2].state is State.ASKED:
                    self._claim(*entry[1:])
            held: dict[Endpoint, dict[str, InboundClaim]] = {}
            for claim in self._claims.values():
                endpoint = self._endpoint(claim.handle)
                if claim.gives_up(now):
                    logger.warning(
                        "Request %s: its load has not ended within %g s; the claim is renewed no more",
                        claim.request_id,
                        self._load_timeout,
                    )
                if claim.is_held and claim.grant is not None and endpoint is not None:
                    held.setdefault(endpoint, {})[claim.grant.request_id] = claim
            stuck = self._is_stuck(now, len(self._claims))
            for endpoint, claims in held.items():
                if now >= self._renew_at.get(endpoint, 0.0) and stuck:
                    self._renew_at[endpoint] = now + _STUCK_LOOK
                elif now >= self._renew_at.get(endpoint, 0.0):
                    self._renew(endpoint, claims, now)
            times = [self._renew_at[endpoint] for endpoint in held] + [at for at, _, _ in self._early]
            return min(times, default=None)

    # Internals ---------------------------------------------------------------------------------------------------

    def _is_stuck(self, now: float, waiting: int) -> bool:
        """Whether requests wait while the engine has not stepped for a load's time; said once each time."""
        stuck = waiting > 0 and now >= self._stepped_at + self._load_timeout
        if stuck and not self._told_stuck:
            logger.warning(
                "The engine has not stepped for %g s while %d request(s) wait; their claims are renewed no more",
                self._load_timeout,
                waiting,
            )
        self._told_stuck = stuck
        return stuck

    def _endpoint(self, handle: Handle) -> Endpoint | None:
        host = self._allowed.resolve(handle.host)
        return None if host is None else (host, handle.port)

    def _ask(
        self, endpoint: Endpoint, message: Request, on_reply: Callable[[Reply | HmaError, float], None], timeout: float
    ) -> None:
        assert self._rpc is not None, "a claim was opened before the control client was attached"
        self._rpc.ask(endpoint, message, timeout=timeout, on_reply=on_reply)

    def _note(self, endpoint: Endpoint, reply: Reply | HmaError) -> None:
        """Silence makes a peer count as away for a while, twice as long each time; any answer ends that."""
        if not isinstance(reply, PeerUnreachable):
            self._away.pop(endpoint, None)
            return
        silences = self._away[endpoint].silences + 1 if endpoint in self._away else 1
        pause = min(MAX_AWAY, FIRST_AWAY * 2 ** min(silences - 1, 16))
        self._away.pop(endpoint, None)
        self._away[endpoint] = _Away(silences, self._clock() + pause)
        if len(self._away) > MAX_PEERS:
            del self._away[next(iter(self._away))]

    def _ask_who(self, endpoint: Endpoint, claim: InboundClaim) -> None:
        waiting = self._asking.setdefault(endpoint, [])
        waiting.append(claim)
        if len(waiting) == 1:
            timeout = max(0.05, claim.deadline - self._clock())
            self._ask(endpoint, Describe(), lambda reply, _: self._described(endpoint, reply), timeout)

    def _described(self, endpoint: Endpoint, reply: Reply | HmaError) -> None:
        with self._lock:
            waiting = self._asking.pop(endpoint, [])
            self._note(endpoint, reply)
            if not isinstance(reply, Described):
                reason, detail = _reason(reply)
                for claim in waiting:
                    claim.refused(reason, detail)
                self._forget(endpoint)
                return
            peer = self._peers.get(endpoint)
            if peer is None or peer.epoch != reply.engine.epoch:
                self._forget(endpoint)
                peer = Peer.examine(endpoint, self._engine, reply.engine)
                self._peers[endpoint] = peer
                if peer.refusal:
                    logger.error("Prefill engine at %s:%d is refused: %s", *endpoint, peer.refusal)
            for claim in waiting:
                self._claim(peer, claim)

    def _claim(self, peer: Peer, claim: InboundClaim) -> None:
        handle = claim.handle
        if peer.epoch == self._engine.epoch:
            where = f"{peer.endpoint[0]}:{peer.endpoint[1]}"
            remedy = "give each engine an advertised_host and control_port of its own"
            claim.refused("engine", f"the handle leads to this engine itself, at {where}: {remedy}")
        elif handle.engine_id != peer.engine.engine_id:
            reached = f"reached engine {peer.engine.engine_id} at {peer.endpoint[0]}:{peer.endpoint[1]}"
            claim.refused("engine", f"wanted engine {handle.engine_id}, {reached}")
        elif handle.epoch != peer.epoch:
            claim.refused(Refusal.EPOCH, "the prefill engine has been restarted since it made the offer")
        elif not peer.geometries:
            claim.refused(Refusal.INCOMPATIBLE, peer.refusal)
        elif claim.state is not State.REFUSED:
            # Also when the client has left meanwhile: the grant is then given back at once, not after a lease.
            message = Claim(
                request_id=handle.request_id,
                epoch=handle.epoch,
                claimant=self._engine.epoch,
                token=claim.token,
                digest=claim.digest,
                fingerprint=self._fingerprint,
            )
            timeout = max(0.05, claim.deadline - self._clock())
            self._ask(peer.endpoint, message, lambda reply, sent: self._answered(peer, claim, reply, sent), timeout)

    def _answered(self, peer: Peer, claim: InboundClaim, reply: Reply | HmaError, sent_at: float) -> None:
        with self._lock:
            self._note(peer.endpoint, reply)
            if isinstance(reply, Granted):
                problem = _misfit(reply, peer)
                taken = claim.refused("malformed", problem) if problem else claim.granted(reply, sent_at)
                if problem or not taken or claim.state is not State.GRANTED:
                    claim.grant = claim.grant or reply
                    self._release(claim)
                else:
                    due, known = sent_at + reply.valid_seconds / 3, self._renew_at.get(peer.endpoint, 0.0)
                    self._renew_at[peer.endpoint] = due if known <= sent_at else min(known, due)
                return
            if isinstance(reply, NotYet):
                self._early.append((self._clock() + reply.seconds, peer, claim))
                return
            reason, detail = _reason(reply)
            claim.refused(reason, detail)
            if isinstance(reply, HmaError) or reason == Refusal.EPOCH:
                self._forget(peer.endpoint)

    def _renew(self, endpoint: Endpoint, claims: dict[str, InboundClaim], now: float) -> None:
        lease = min(claim.grant.valid_seconds for claim in claims.values() if claim.grant is not None)
        self._renew_at[endpoint] = now + lease / 3
        epochs: dict[str, list[str]] = {}
        for offer_id, claim in claims.items():
            epochs.setdefault(claim.handle.epoch, []).append(offer_id)
        for epoch, offer_ids in epochs.items():
            message = Renew(epoch=epoch, claimant=self._engine.epoch, request_ids=tuple(offer_ids))
            sent = {offer_id: claims[offer_id] for offer_id in offer_ids}
            self._ask(endpoint, message, partial(self._renewed, sent), lease / 3)

    def _renewed(self, sent: Mapping[str, InboundClaim], reply: Reply | HmaError, sent_at: float) -> None:
        with self._lock:
            if isinstance(reply, Renewed):
                for offer_id, claim in sent.items():
                    if offer_id in reply.request_ids:
                        claim.valid_until = max(claim.valid_until, sent_at + reply.valid_seconds)
                    else:
                        claim.valid_until = 0.0
            elif isinstance(reply, Refused):
                for claim in sent.values():
                    claim.valid_until = 0.0
            # No answer: the lease runs on by itself and ends when it ends.

    def _release(self, claim: InboundClaim) -> None:
        endpoint = self._endpoint(claim.handle)
        if claim.grant is None or endpoint is None:
            return
        epoch, offer_id = claim.handle.epoch, claim.grant.request_id
        message = Release(epoch=epoch, claimant=self._engine.epoch, request_ids=(offer_id,))
        self._ask(endpoint, message, lambda _reply, _at: None, RELEASE_TIMEOUT)

    def _forget(self, endpoint: Endpoint) -> None:
        peer = self._peers.pop(endpoint, None)
        if peer is not None:
            self._dropped.append(peer.epoch)
        if self._rpc is not None:
            self._rpc.drop(endpoint)


def _reason(reply: Reply | HmaError) -> tuple[str, str]:
    if isinstance(reply, Refused):
        return reply.reason, reply.detail
    if isinstance(reply, HmaError):
        return reply.code, reply.message
    return "malformed", f"an answer to another question: {type(reply).__name__}"


def _misfit(grant: Granted, peer: Peer) -> str:
    """What is wrong with a grant's blocks, or an empty text."""
    geometry = peer.geometries[0]  # ranks differ in what they hold of a block, not in their blocks
    num_blocks = min(rank.num_blocks for rank in peer.geometries)
    if len(grant.groups) != len(geometry.groups):
        return f"granted {len(grant.groups)} groups"
    for index, (granted, group) in enumerate(zip(grant.groups, geometry.groups, strict=True)):
        held = range(granted.first, granted.first + len(granted.ids))
        live = blocks_covering(group.kind.live_range(grant.num_tokens), group.block_size)
        if live and (live.start < held.start or live.stop > held.stop):
            return f"group {index} ({group.kind.name}) holds block positions {held}, needed are {live}"
        if granted.ids and max(granted.ids) >= num_blocks:
            return f"group {index} names block {max(granted.ids)} of {num_blocks}"
    return ""
