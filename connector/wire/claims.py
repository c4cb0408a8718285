"""D's side of the control plane: one claim a request, from its handle to the end of its load, without I/O.

    state      event      next state
    asked      grant      granted
    asked      refuse     refused     (by P, by the peer check, or no answer within the deadline)
    asked      cancel     over        (the client left; a grant that arrives later is released)
    granted    load       loading     (blocks are allocated, the plan is with the worker)
    granted    skip       over        (everything is in D's prefix cache)
    granted    lapse      refused     (the lease ended before blocks were free)
    granted    cancel     over
    loading    finish     over        (success or failure: all reads have ended)
    refused    give_up    over        (the request is recomputed or failed)
    refused    cancel     over

A cancelled load stays `loading` until the worker has seen all reads end: its claim is kept for as long. Every other
pair of state and event changes nothing, so completions that come twice, late or after an abort are ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from connector.wire.handle import Handle
from connector.wire.messages import Granted


class State(StrEnum):
    ASKED = "asked"
    GRANTED = "granted"
    LOADING = "loading"
    REFUSED = "refused"
    OVER = "over"


class Event(StrEnum):
    GRANT = "grant"
    REFUSE = "refuse"
    CANCEL = "cancel"
    LOAD = "load"
    SKIP = "skip"
    LAPSE = "lapse"
    FINISH = "finish"
    GIVE_UP = "give_up"


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.ASKED, Event.GRANT): State.GRANTED,
        (State.ASKED, Event.REFUSE): State.REFUSED,
        (State.ASKED, Event.CANCEL): State.OVER,
        (State.GRANTED, Event.LOAD): State.LOADING,
        (State.GRANTED, Event.SKIP): State.OVER,
        (State.GRANTED, Event.LAPSE): State.REFUSED,
        (State.GRANTED, Event.CANCEL): State.OVER,
        (State.LOADING, Event.FINISH): State.OVER,
        (State.REFUSED, Event.GIVE_UP): State.OVER,
        (State.REFUSED, Event.CANCEL): State.OVER,
    }
)
HOLDS_CLAIM = frozenset({State.GRANTED, State.LOADING})


@dataclass(slots=True)
class InboundClaim:
    """One request of D that wants P's KV.

    token: names this claim to P, whatever id the client gave its request.
    deadline: when an unanswered claim counts as refused; once loading, when the load counts as failed and the claim is
    renewed no more (given_up). valid_until: end of the lease, by D's clock, counted from the
    moment D sent the claim or renewal, so that it never ends after P's own.
    """

    request_id: str
    handle: Handle
    digest: bytes
    num_tokens: int
    deadline: float
    state: State = State.ASKED
    reason: str = ""
    detail: str = ""
    valid_until: float = 0.0
    grant: Granted | None = None
    cancelled: bool = False
    given_up: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_held(self) -> bool:
        """Whether P is to keep the blocks."""
        return self.state in HOLDS_CLAIM and not self.given_up

    def gives_up(self, now: float) -> bool:
        """Whether a load is past its deadline; True once, then the claim is held no more."""
        if self.state is not State.LOADING or self.given_up or now < self.deadline:
            return False
        self.given_up = True
        return True

    def move(self, event: Event) -> bool:
        """Apply an event; False, and no change, when the state does not know it."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            return False
        self.state = target
        return True

    def granted(self, grant: Granted, sent_at: float) -> bool:
        """P's answer is yes. Shapes that do not fit this request are a refusal."""
        if grant.num_tokens != self.num_tokens:
            return self.refused("malformed", f"granted {grant.num_tokens} tokens, asked for {self.num_tokens}")
        if not self.move(Event.GRANT):
            return False
        self.grant = grant
        self.valid_until = sent_at + grant.valid_seconds
        return True

    def refused(self, reason: str, detail: str = "") -> bool:
        """No from P, from the peer check, or from the clock."""
        if not self.move(Event.REFUSE):
            return False
        self.reason, self.detail = reason, detail
        return True

    def tick(self, now: float) -> None:
        """Let the clock speak: an unanswered claim is refused, an unused grant lapses."""
        if self.state is State.ASKED and now >= self.deadline:
            self.refused("timeout", "no answer to the claim within its deadline")
        elif self.state is State.GRANTED and now >= self.valid_until and self.move(Event.LAPSE):
            self.reason, self.detail = "lapsed", "the lease ended before blocks were free"
