"""D's claims: the table as a whole, and the clock."""

from __future__ import annotations

from itertools import product

import pytest

from connector.wire.claims import HOLDS_CLAIM, TRANSITIONS, Event, InboundClaim, State
from connector.wire.handle import Handle
from connector.wire.messages import Granted
from tests.unit.connector.wire.samples import DIGEST

LEGAL = {
    ("asked", "grant"): "granted",
    ("asked", "refuse"): "refused",
    ("asked", "cancel"): "over",
    ("granted", "load"): "loading",
    ("granted", "skip"): "over",
    ("granted", "lapse"): "refused",
    ("granted", "cancel"): "over",
    ("loading", "finish"): "over",
    ("refused", "give_up"): "over",
    ("refused", "cancel"): "over",
}


def inbound(state: State = State.ASKED) -> InboundClaim:
    handle = Handle(engine_id="prefill-0", epoch="e", request_id="p", host="127.0.0.1", port=5600)
    return InboundClaim(
        request_id="d", handle=handle, digest=DIGEST, num_tokens=99, deadline=10.0, state=state, token="t"
    )


def grant(num_tokens: int = 99) -> Granted:
    return Granted(request_id="p", num_tokens=num_tokens, valid_seconds=30.0, groups=())


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    claim = inbound(state)
    expected = LEGAL.get((state.value, event.value))
    assert claim.move(event) is (expected is not None)
    assert claim.state == (expected or state)


def test_the_table_says_nothing_else() -> None:
    assert {(state.value, event.value): target.value for (state, event), target in TRANSITIONS.items()} == LEGAL


def test_a_claim_is_held_from_the_grant_to_the_end_of_all_reads() -> None:
    assert {State.GRANTED, State.LOADING} == HOLDS_CLAIM


def test_a_grant_counts_from_the_moment_the_claim_was_sent() -> None:
    claim = inbound()
    assert claim.granted(grant(), sent_at=3.0)
    assert (claim.state, claim.valid_until, claim.grant) == (State.GRANTED, 33.0, grant())


@pytest.mark.parametrize("state", [state for state in State if state is not State.ASKED])
def test_a_late_answer_changes_nothing(state: State) -> None:
    for answer in (grant(), grant(98)):
        claim = inbound(state)
        assert not claim.granted(answer, sent_at=3.0)
        assert claim == inbound(state)
    claim = inbound(state)
    assert not claim.refused("unknown", "late")
    assert claim == inbound(state)


@pytest.mark.parametrize("tokens", [98, 100])
def test_a_grant_of_another_length_is_a_refusal(tokens: int) -> None:
    claim = inbound()
    assert claim.granted(grant(tokens), sent_at=3.0)  # the claim has moved
    assert (claim.state, claim.reason) == (State.REFUSED, "malformed")
    assert str(tokens) in claim.detail and "99" in claim.detail
    assert claim.grant is None


def test_a_refusal_keeps_its_reason() -> None:
    claim = inbound()
    assert claim.refused("digest", "The offer is for another prompt.")
    assert (claim.state, claim.reason, claim.detail) == (State.REFUSED, "digest", "The offer is for another prompt.")


@pytest.mark.parametrize(("now", "state", "reason"), [(9.999, "asked", ""), (10.0, "refused", "timeout")])
def test_an_unanswered_claim_is_refused_at_its_deadline(now: float, state: str, reason: str) -> None:
    claim = inbound()
    claim.tick(now)
    assert (claim.state.value, claim.reason) == (state, reason)


@pytest.mark.parametrize(("now", "state", "reason"), [(32.9, "granted", ""), (33.0, "refused", "lapsed")])
def test_an_unused_grant_lapses_with_its_lease(now: float, state: str, reason: str) -> None:
    claim = inbound()
    claim.granted(grant(), sent_at=3.0)
    claim.tick(now)  # long after the deadline of the answer, which has come
    assert (claim.state.value, claim.reason) == (state, reason)


@pytest.mark.parametrize("state", [State.LOADING, State.REFUSED, State.OVER])
def test_the_clock_ends_nothing_else(state: State) -> None:
    claim = inbound(state)
    claim.tick(1e9)
    assert claim == inbound(state)
