"""P's offers: the table as a whole, every answer to a claim, and the promise to free blocks exactly once."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.plan.build import Blocks
from connector.wire import offers
from connector.wire.messages import Claim, Granted, OfferedBlocks, Refused
from connector.wire.offers import TRANSITIONS, Event, Offer, OfferTable, Refusal, State, parent_of
from tests.unit.connector.wire.samples import DIGEST, EPOCH, FINGERPRINT, claim

LEASE = 10.0
OTHER_DIGEST = bytes(32)
LEGAL = {
    ("offered", "claim"): "claimed",
    ("offered", "decline"): "released",
    ("offered", "expire"): "expired",
    ("claimed", "renew"): "claimed",
    ("claimed", "release"): "released",
    ("claimed", "expire"): "expired",
}


def offer(request_id: str = "cmpl-a-0-x", digest: bytes = DIGEST, parent: str | None = None) -> Offer:
    return Offer(
        request_id=request_id,
        parent=parent_of(request_id) if parent is None else parent,
        digest=digest,
        num_tokens=99,
        blocks=(Blocks(0, (7, 8, 9)), Blocks(2, (3,))),
    )


def table(*made: Offer, now: float = 0.0) -> OfferTable:
    result = OfferTable(epoch=EPOCH, lease=LEASE)
    for each in made or (offer(),):
        result.add(each, now)
    return result


def granted_id(answer: Granted | Refused) -> str:
    assert isinstance(answer, Granted), answer
    return answer.request_id


def reason(answer: Granted | Refused) -> str:
    assert isinstance(answer, Refused), answer
    assert answer.detail.endswith(".")
    return answer.reason


def test_the_table_is_the_specification() -> None:
    assert {(state.value, event.value): target.value for (state, event), target in TRANSITIONS.items()} == LEGAL


def in_state(state: State) -> OfferTable:
    """A table whose one offer is in `state` at time 5; taken by decode-1 with token t1 where it has been taken."""
    result = table()
    if state in (State.CLAIMED, State.RELEASED):
        granted_id(result.claim(claim(), 5.0, FINGERPRINT))
    if state is State.RELEASED:
        result.release(["cmpl-a-0-x"], "decode-1", 5.0)
    if state is State.EXPIRED:
        result = table(now=5.0 - LEASE)
        result.expire(5.0)
    result.take_freed()
    return result


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    """Through the public methods: what the event answers, and whether the blocks are freed by it."""
    offered, ids = in_state(state), ["cmpl-a-0-x"]
    legal = (state.value, event.value) in LEGAL
    if event is Event.CLAIM:
        answer = offered.claim(claim(token="t2"), 5.0, FINGERPRINT)
        assert isinstance(answer, Granted) is legal
    elif event is Event.RENEW:
        assert offered.renew(ids, "decode-1", 5.0) == (tuple(ids) if legal else ())
    elif event is Event.RELEASE:
        assert offered.release(ids, "decode-1", 5.0) == (tuple(ids) if legal else ())
    elif event is Event.DECLINE:
        assert offered.decline("cmpl-a-0-x", 5.0) is legal
    else:
        assert offered.expire(5.0 + LEASE) == (1 if legal else 0)
    ends = LEGAL.get((state.value, event.value)) in ("released", "expired")
    assert offered.take_freed() == (ids if ends else [])
    assert len(offered) == (0 if ends or state in (State.RELEASED, State.EXPIRED) else 1)


def test_a_grant_names_the_blocks() -> None:
    assert table().claim(claim(), 1.0, FINGERPRINT) == Granted(
        request_id="cmpl-a-0-x",
        num_tokens=99,
        valid_seconds=LEASE,
        groups=(OfferedBlocks(first=0, ids=(7, 8, 9)), OfferedBlocks(first=2, ids=(3,))),
    )


def test_the_same_claim_is_granted_again_and_its_lease_begins_anew() -> None:
    offered = table()
    first = offered.claim(claim(), 1.0, FINGERPRINT)
    assert offered.claim(claim(), 8.0, FINGERPRINT) == first
    assert offered.expire(17.9) == 0
    assert offered.expire(18.0) == 1


@pytest.mark.parametrize("other", [claim(token="t2"), claim(claimant="decode-2")])
def test_another_claim_of_a_claimed_offer_finds_it_consumed(other: Claim) -> None:
    offered = table()
    granted_id(offered.claim(claim(), 1.0, FINGERPRINT))
    assert reason(offered.claim(other, 2.0, FINGERPRINT)) == Refusal.CONSUMED


def test_a_claim_after_the_release_finds_it_consumed() -> None:
    offered = in_state(State.RELEASED)
    assert reason(offered.claim(claim(), 5.0, FINGERPRINT)) == Refusal.CONSUMED


@pytest.mark.parametrize(("now", "granted"), [(9.999, True), (10.0, False)])
def test_an_offer_waits_as_long_as_its_lease(now: float, granted: bool) -> None:
    offered = table()
    answer = offered.claim(claim(), now, FINGERPRINT)
    assert isinstance(answer, Granted) is granted
    assert granted or reason(answer) == Refusal.EXPIRED
    assert offered.expired == (0 if granted else 1)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (claim("cmpl-nobody"), Refusal.UNKNOWN),
        (claim(epoch="epoch-0"), Refusal.EPOCH),
        (claim(fingerprint=bytes(32)), Refusal.INCOMPATIBLE),
        (claim(digest=OTHER_DIGEST), Refusal.DIGEST),
        # The first reason that holds is told: a restarted engine knows nothing of the others.
        (claim("cmpl-nobody", epoch="epoch-0", fingerprint=bytes(32), digest=OTHER_DIGEST), Refusal.EPOCH),
        (claim("cmpl-nobody", fingerprint=bytes(32), digest=OTHER_DIGEST), Refusal.INCOMPATIBLE),
    ],
)
def test_a_refusal_gives_its_reason_and_takes_nothing(asked: Claim, expected: Refusal) -> None:
    offered = table()
    assert reason(offered.claim(asked, 1.0, FINGERPRINT)) == expected
    assert granted_id(offered.claim(claim(), 2.0, FINGERPRINT)) == "cmpl-a-0-x"


def test_a_refused_claim_does_not_extend_the_lease() -> None:
    offered = table()
    offered.claim(claim(digest=OTHER_DIGEST), 9.0, FINGERPRINT)
    assert offered.expire(10.0) == 1


def test_a_list_of_prompts_with_one_handle_gets_each_its_own_offer() -> None:
    digests = [bytes([index]) * 32 for index in range(3)]
    offered = table(*(offer(f"cmpl-a-{index}-x{index}", digest) for index, digest in enumerate(digests)))
    for index, digest in enumerate(digests):
        answer = offered.claim(claim("cmpl-a-2-x2", digest=digest, token=f"t{index}"), 1.0, FINGERPRINT)
        assert granted_id(answer) == f"cmpl-a-{index}-x{index}"


def test_equal_prompts_of_one_list_are_granted_one_each() -> None:
    offered = table(offer("cmpl-a-0-x"), offer("cmpl-a-1-y"))
    got = [granted_id(offered.claim(claim("cmpl-a-1-y", token=token), 1.0, FINGERPRINT)) for token in ("t1", "t2")]
    assert sorted(got) == ["cmpl-a-0-x", "cmpl-a-1-y"]
    assert reason(offered.claim(claim("cmpl-a-1-y", token="t3"), 1.0, FINGERPRINT)) == Refusal.CONSUMED


def test_a_sibling_is_found_after_the_named_offer_has_ended() -> None:
    offered = table(offer("cmpl-a-0-x"), offer("cmpl-a-1-y", OTHER_DIGEST))
    granted_id(offered.claim(claim("cmpl-a-0-x"), 1.0, FINGERPRINT))
    offered.release(["cmpl-a-0-x"], "decode-1", 1.0)
    assert granted_id(offered.claim(claim("cmpl-a-0-x", digest=OTHER_DIGEST), 2.0, FINGERPRINT)) == "cmpl-a-1-y"


def test_a_sibling_granted_through_another_handle_is_granted_again_when_the_reply_was_lost() -> None:
    offered = table(offer("cmpl-a-0-x", OTHER_DIGEST), offer("cmpl-a-1-y"))
    asked = claim("cmpl-a-0-x")
    assert granted_id(offered.claim(asked, 1.0, FINGERPRINT)) == "cmpl-a-1-y"
    assert granted_id(offered.claim(asked, 2.0, FINGERPRINT)) == "cmpl-a-1-y"


def test_one_token_never_takes_two_equal_prompts() -> None:
    """The lost reply again, with a second offer that the repeated claim could take by mistake."""
    offered = table(offer("cmpl-a-0-x"), offer("cmpl-a-1-y"), offer("cmpl-a-2-z", OTHER_DIGEST))
    asked = claim("cmpl-a-2-z")
    first = granted_id(offered.claim(asked, 1.0, FINGERPRINT))
    assert granted_id(offered.claim(asked, 2.0, FINGERPRINT)) == first
    assert offered.release(["cmpl-a-0-x", "cmpl-a-1-y"], "decode-1", 3.0) == (first,)


def test_an_offer_of_another_list_is_no_sibling() -> None:
    offered = table(offer("cmpl-a-0-x", OTHER_DIGEST), offer("cmpl-b-0-y"))
    assert reason(offered.claim(claim("cmpl-a-0-x"), 1.0, FINGERPRINT)) == Refusal.DIGEST


@pytest.mark.parametrize(
    ("request_id", "parent"),
    [
        ("cmpl-1234-0-abcd", "cmpl-1234"),
        ("cmpl-12-34-17-abcd", "cmpl-12-34"),
        ("chatcmpl-1234-abcd", "chatcmpl"),  # all digits read as an index: only the digest decides then
        ("plain", "plain"),
        ("a-b", "a-b"),
        ("", ""),
    ],
)
def test_the_parent_of_a_request_id(request_id: str, parent: str) -> None:
    assert parent_of(request_id) == parent


def test_renewal_extends_the_claims_of_the_claimant_only() -> None:
    offered = table(offer("a"), offer("b"), offer("c"))
    offered.claim(claim("a"), 1.0, FINGERPRINT)
    offered.claim(claim("b", claimant="decode-2"), 1.0, FINGERPRINT)
    assert offered.renew(["a", "b", "c", "nobody"], "decode-1", 9.0) == ("a",)
    assert offered.expire(11.0) == 2  # c at 10, b at 11
    assert offered.renew(["a"], "decode-1", 18.9) == ("a",)
    assert offered.expire(28.8) == 0
    assert offered.renew(["a"], "decode-1", 28.9) == ()
    assert sorted(offered.take_freed()) == ["a", "b", "c"]
    assert offered.expired == 3


def test_an_unclaimed_offer_belongs_to_nobody() -> None:
    offered = table()
    for claimant in ("decode-1", ""):
        assert offered.renew(["cmpl-a-0-x"], claimant, 1.0) == ()
        assert offered.release(["cmpl-a-0-x"], claimant, 1.0) == ()
    assert len(offered) == 1


def test_only_the_claimant_releases_and_only_once() -> None:
    offered = table()
    offered.claim(claim(), 1.0, FINGERPRINT)
    assert offered.release(["cmpl-a-0-x"], "decode-2", 2.0) == ()
    assert offered.release(["cmpl-a-0-x", "cmpl-a-0-x"], "decode-1", 3.0) == ("cmpl-a-0-x",)
    assert offered.release(["cmpl-a-0-x"], "decode-1", 4.0) == ()
    assert offered.take_freed() == ["cmpl-a-0-x"]
    assert offered.take_freed() == []
    assert offered.expired == 0


def test_endings_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "REMEMBERED", 2)
    offered = table(offer("a"), offer("b"), offer("c"))
    offered.expire(LEASE)
    answers = [reason(offered.claim(claim(name), 11.0, FINGERPRINT)) for name in ("a", "b", "c")]
    assert answers == [Refusal.UNKNOWN, Refusal.EXPIRED, Refusal.EXPIRED]


class OffersAgainstAModel(RuleBasedStateMachine):
    """Any sequence of events, two D engines, three lists of prompts; the model is a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = OfferTable(epoch=EPOCH, lease=LEASE)
        self.holder: dict[str, tuple[str, str] | None] = {}  # live offers: claimant and token
        self.expires: dict[str, float] = {}
        self.digest: dict[str, bytes] = {}
        self.ended: list[str] = []
        self.freed: list[str] = []
        self.made = 0

    names = st.integers(0, 11)
    claimants = st.sampled_from(["decode-1", "decode-2"])
    digests = st.sampled_from([DIGEST, OTHER_DIGEST])

    def name(self, number: int) -> str:
        return f"cmpl-{number % 3}-{number}-r"

    def end_leases(self) -> None:
        for name in [name for name, end in self.expires.items() if end <= self.now]:
            self.end(name)

    def end(self, name: str) -> None:
        del self.holder[name], self.expires[name]
        self.ended.append(name)

    @rule(digest=digests)
    def add(self, digest: bytes) -> None:
        name = self.name(self.made)
        self.made += 1
        self.table.add(offer(name, digest), self.now)
        self.holder[name], self.expires[name], self.digest[name] = None, self.now + LEASE, digest

    @rule(number=names, claimant=claimants, token=st.sampled_from(["t1", "t2"]), digest=digests)
    def claims(self, number: int, claimant: str, token: str, digest: bytes) -> None:
        name = self.name(number)
        self.end_leases()
        answer = self.table.claim(claim(name, claimant=claimant, token=token, digest=digest), self.now, FINGERPRINT)
        fitting = {
            other
            for other, held in self.holder.items()
            if parent_of(other) == parent_of(name) and self.digest[other] == digest
        }
        free = {other for other in fitting if self.holder[other] is None}
        mine = {other for other in fitting if self.holder[other] == (claimant, token)}
        if isinstance(answer, Granted):
            assert answer.request_id in free | mine
            assert not mine or answer.request_id in mine
            self.holder[answer.request_id] = (claimant, token)
            self.expires[answer.request_id] = self.now + LEASE
        else:
            assert not free and not mine

    @rule(number=names, claimant=claimants)
    def renews(self, number: int, claimant: str) -> None:
        name = self.name(number)
        self.end_leases()
        held = self.holder.get(name)
        valid = held is not None and held[0] == claimant
        assert self.table.renew([name], claimant, self.now) == ((name,) if valid else ())
        if valid:
            self.expires[name] = self.now + LEASE

    @rule(number=names, claimant=claimants)
    def releases(self, number: int, claimant: str) -> None:
        name = self.name(number)
        self.end_leases()
        held = self.holder.get(name)
        valid = held is not None and held[0] == claimant
        assert self.table.release([name], claimant, self.now) == ((name,) if valid else ())
        if valid:
            self.end(name)

    @rule(number=names)
    def declines(self, number: int) -> None:
        name = self.name(number)
        self.end_leases()
        valid = name in self.holder and self.holder[name] is None
        assert self.table.decline(name, self.now) is valid
        if valid:
            self.end(name)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, LEASE]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        before = len(self.holder)
        self.end_leases()
        assert self.table.expire(self.now) == before - len(self.holder)

    @rule()
    def engine_frees(self) -> None:
        self.freed.extend(self.table.take_freed())

    @invariant()
    def live_offers_agree(self) -> None:
        assert len(self.table) == len(self.holder)

    def teardown(self) -> None:
        self.now += LEASE
        self.end_leases()
        self.table.expire(self.now)
        self.engine_frees()
        assert len(self.table) == 0
        assert len(set(self.freed)) == len(self.freed) == self.made
        assert set(self.freed) == set(self.ended)


TestOffersAgainstAModel = OffersAgainstAModel.TestCase
TestOffersAgainstAModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
