"""P's side of the control plane: offers, their claims and their leases, as a table without I/O.

An offer's life:

    state     event     next state
    offered   claim     claimed      (granted; and again to the same claim, when its reply was lost)
    offered   expire    expired
    claimed   renew     claimed      (lease extended)
    claimed   release   released
    claimed   expire    expired

`released` and `expired` are final: the blocks go back to the engine exactly once, and the id is remembered for a while
so that a late claim is refused by its true reason. Every other pair of state and event changes nothing.
Times are seconds of one clock that the caller reads; nothing here sleeps or reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import repeat
from types import MappingProxyType

from connector.plan.build import Blocks
from connector.wire.messages import Claim, Granted, NotYet, OfferedBlocks, Refused

REMEMBERED = 4096
ASK_AGAIN = 0.01  # seconds until a claim that came too early is worth another try


class State(StrEnum):
    OFFERED = "offered"
    CLAIMED = "claimed"
    RELEASED = "released"
    EXPIRED = "expired"


class Event(StrEnum):
    CLAIM = "claim"
    RENEW = "renew"
    RELEASE = "release"
    DECLINE = "decline"
    EXPIRE = "expire"


class Refusal(StrEnum):
    """Why a claim is refused. The words are labels of metrics, too."""

    UNKNOWN = "unknown"
    EPOCH = "epoch"
    EXPIRED = "expired"
    CONSUMED = "consumed"
    DIGEST = "digest"
    INCOMPATIBLE = "incompatible"
    UNAUTHORISED = "unauthorised"
    MALFORMED = "malformed"
    REPLAYED = "replayed"
    THROTTLED = "throttled"
    NOT_ALLOWED = "not_allowed"


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.OFFERED, Event.CLAIM): State.CLAIMED,
        (State.OFFERED, Event.DECLINE): State.RELEASED,
        (State.OFFERED, Event.EXPIRE): State.EXPIRED,
        (State.CLAIMED, Event.RENEW): State.CLAIMED,
        (State.CLAIMED, Event.RELEASE): State.RELEASED,
        (State.CLAIMED, Event.EXPIRE): State.EXPIRED,
    }
)
FINAL = frozenset({State.RELEASED, State.EXPIRED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """P's promise to keep a finished prompt's live blocks.

    num_tokens: computed tokens, one less than the prompt. parent: what the siblings of one list of prompts share.
    digests: by group, of the blocks' pages; None while they are being computed, empty where pages are not verified.
    """

    request_id: str
    parent: str
    digest: bytes
    num_tokens: int
    blocks: tuple[Blocks, ...]
    digests: tuple[bytes, ...] | None = ()


@dataclass(slots=True)
class _Entry:
    offer: Offer
    state: State
    expires: float
    claimant: str = ""
    token: str = ""


class OfferTable:
    """All offers of one engine life. Not thread-safe: the owner holds a lock.

    lease: seconds an offer waits for its claim, and seconds a claim lasts without renewal.
    """

    def __init__(self, *, epoch: str, lease: float) -> None:
        self.epoch = epoch
        self.lease = lease
        self._live: dict[str, _Entry] = {}
        self._ended: OrderedDict[str, State] = OrderedDict()
        self._freed: list[str] = []
        self.expired = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, offer: Offer, now: float) -> None:
        """Record a new offer. Ids are the engine's own and unique within its life."""
        assert offer.request_id not in self._live, "vLLM gave one request id twice"
        self._live[offer.request_id] = _Entry(offer, State.OFFERED, now + self.lease)

    def publish(self, request_id: str, digests: tuple[bytes, ...]) -> None:
        """The digests of an offer's pages have been computed. An offer that is over is none any more."""
        if (entry := self._live.get(request_id)) is not None:
            entry.offer = replace(entry.offer, digests=digests)

    def claim(self, claim: Claim, now: float, fingerprint: bytes) -> Granted | NotYet | Refused:
        """Answer a claim. A claimant that asks again (its reply was lost) is granted again."""
        self.expire(now)
        if claim.epoch != self.epoch:
            return _refused(Refusal.EPOCH, "This engine has been restarted since the offer was made.")
        if claim.fingerprint != fingerprint:
            return _refused(Refusal.INCOMPATIBLE, "The claimant's geometry is not this engine's.")
        asked = self._live.get(claim.request_id)
        entry = self._grantable(claim, asked)
        if entry is None:
            return self._refusal(claim, asked)
        return NotYet(seconds=ASK_AGAIN) if entry.offer.digests is None else self._grant(entry, claim, now)

    def renew(self, request_ids: Iterable[str], claimant: str, now: float) -> tuple[str, ...]:
        """Extend this claimant's claims; returns those that are still valid."""
        self.expire(now)
        kept = []
        for request_id in request_ids:
            entry = self._live.get(request_id)
            if entry is not None and entry.claimant == claimant and self._move(entry, Event.RENEW):
                entry.expires = now + self.lease
                kept.append(request_id)
        return tuple(kept)

    def release(self, request_ids: Iterable[str], claimant: str, now: float) -> tuple[str, ...]:
        """End the offers that `claimant` holds; returns those that ended now."""
        self.expire(now)
        ended = []
        for request_id in request_ids:
            entry = self._live.get(request_id)
            if entry is not None and entry.claimant == claimant and self._move(entry, Event.RELEASE):
                ended.append(request_id)
        return tuple(ended)

    def decline(self, request_id: str, now: float) -> bool:
        """End an offer that nobody has claimed nor will. False when there is none."""
        self.expire(now)
        entry = self._live.get(request_id)
        return entry is not None and self._move(entry, Event.DECLINE)

    def expire(self, now: float) -> int:
        """End every lease that is over; returns how many."""
        over = [entry for entry in self._live.values() if entry.expires <= now]
        for entry in over:
            self._move(entry, Event.EXPIRE)
        self.expired += len(over)
        return len(over)

    def take_freed(self) -> list[str]:
        """Request ids whose blocks go back to the engine; each is returned once."""
        freed, self._freed = self._freed, []
        return freed

    def _grantable(self, claim: Claim, asked: _Entry | None) -> _Entry | None:
        """The offer that this claim may read: the one it holds (its reply was lost), the one it asked for, or an
        unclaimed sibling for the same prompt.

        Siblings are the offers of one list of prompts: a router gets one handle for all of them, and the digest says
        which offer is whose.
        """
        parent = asked.offer.parent if asked is not None else parent_of(claim.request_id)
        fitting = [e for e in self._live.values() if e.offer.parent == parent and e.offer.digest == claim.digest]
        for entry in fitting:
            if (entry.claimant, entry.token) == (claim.claimant, claim.token):
                return entry
        free = [entry for entry in fitting if entry.state is State.OFFERED]
        return asked if asked in free else next(iter(free), None)

    def _grant(self, entry: _Entry, claim: Claim, now: float) -> Granted:
        self._move(entry, Event.CLAIM)
        entry.claimant, entry.token = claim.claimant, claim.token
        entry.expires = now + self.lease
        offer = entry.offer
        return Granted(
            request_id=offer.request_id,
            num_tokens=offer.num_tokens,
            valid_seconds=self.lease,
            groups=tuple(
                OfferedBlocks(first=blocks.first, ids=blocks.ids, digests=digests)
                for blocks, digests in zip(offer.blocks, offer.digests or repeat(b""), strict=False)
            ),
        )

    def _refusal(self, claim: Claim, entry: _Entry | None) -> Refused:
        if entry is not None:
            if entry.offer.digest != claim.digest:
                return _refused(Refusal.DIGEST, "The offer is for another prompt.")
            return _refused(Refusal.CONSUMED, "Another request has claimed this offer.")
        ended = self._ended.get(claim.request_id)
        if ended is State.RELEASED:
            return _refused(Refusal.CONSUMED, "The offer has been read and released.")
        if ended is State.EXPIRED:
            return _refused(Refusal.EXPIRED, f"The offer's lease of {self.lease:g} s is over.")
        return _refused(Refusal.UNKNOWN, "No such offer.")

    def _move(self, entry: _Entry, event: Event) -> bool:
        target = TRANSITIONS.get((entry.state, event))
        if target is None:
            return False
        entry.state = target
        if target in FINAL:
            request_id = entry.offer.request_id
            del self._live[request_id]
            self._freed.append(request_id)
            self._ended[request_id] = target
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        return True


def parent_of(request_id: str) -> str:
    """What the requests of one list of prompts share: vLLM names them `<parent>-<index>-<random>`."""
    parts = request_id.rsplit("-", 2)
    return parts[0] if len(parts) == 3 and parts[1].isdigit() else request_id


def _refused(reason: Refusal, detail: str) -> Refused:
    return Refused(reason=reason, detail=detail)
