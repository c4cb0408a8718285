"""Inbound and Outbound joined by a network that loses, delays and repeats messages.

Nothing is granted twice, nothing is held for longer than a lease, every claim ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.control.inbound import Inbound
from connector.control.outbound import Outbound
from connector.control.peers import AllowedPeers, Endpoint
from connector.errors import HmaError, PeerSilent
from connector.plan.build import Blocks
from connector.wire.claims import Event, State
from connector.wire.codec import Codec
from connector.wire.handle import Handle
from connector.wire.messages import Granted, Reply, Request
from connector.wire.offers import Offer, parent_of
from tests.unit.connector.describe import engine_description

LEASE, TIMEOUT, LOAD, TOKENS = 10.0, 3.0, 25.0, 47
DIGEST = b"d" * 32


@dataclass
class InFlight:
    due: float
    deliver: Callable[[], None]


class FakeNetwork:
    """Both directions of one channel, in simulated time. fates: what happens to the n-th message, then all is well."""

    def __init__(self, outbound: Outbound, fates: list[tuple[str, float]]) -> None:
        self.outbound, self.fates = outbound, fates
        self.now = 0.0
        self.queue: list[InFlight] = []
        self.grants: dict[str, set[str]] = {}
        self.answered: set[int] = set()
        self.asked = 0

    def clock(self) -> float:
        return self.now

    def ask(
        self,
        endpoint: Endpoint,
        message: Request,
        *,
        timeout: float,
        on_reply: Callable[[Reply | HmaError, float], None],
    ) -> None:
        number, sent = self.asked, self.now
        self.asked += 1
        frame, _ = Codec().request(message)  # as on a wire: nothing but bytes is shared
        decoded, nonce, _ = Codec().read_request(frame)

        def answer(reply: Reply | HmaError) -> None:
            if number not in self.answered:
                self.answered.add(number)
                on_reply(reply, sent)

        def serve() -> None:
            reply = self.outbound.handle(decoded)
            if isinstance(reply, Granted):
                self.grants.setdefault(reply.request_id, set()).add(getattr(decoded, "token", ""))
            back, _ = Codec().read_reply(Codec().reply(reply, nonce))
            self.send(lambda: answer(back))

        self.send(serve)
        silent = PeerSilent(f"No answer from {endpoint}.")
        self.queue.append(InFlight(sent + timeout, lambda: answer(silent)))

    def drop(self, endpoint: Endpoint) -> None:
        """A new connection is made by the next question."""

    def send(self, deliver: Callable[[], None]) -> None:
        fate, delay = self.fates.pop(0) if self.fates else ("arrives", 0.001)
        copies = {"lost": 0, "arrives": 1, "twice": 2}[fate]
        self.queue += [InFlight(self.now + delay * (copy + 1), deliver) for copy in range(copies)]

    def run_until(self, moment: float, tick: Callable[[float], object]) -> None:
        while self.now < moment:
            due = min((item.due for item in self.queue), default=moment)
            self.now = min(max(self.now, due), moment, self.now + 0.25)
            ready = [item for item in self.queue if item.due <= self.now]
            self.queue = [item for item in self.queue if item.due > self.now]
            for item in ready:
                item.deliver()
            tick(self.now)


fates = st.lists(st.tuples(st.sampled_from(["arrives", "lost", "twice"]), st.floats(0.001, 6.0)), max_size=14)
uses = st.lists(st.sampled_from([Event.FINISH, Event.CANCEL, Event.SKIP, Event.LOAD]), min_size=1, max_size=4)


@given(fates, uses, st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_double_grant_no_leak_no_hang(fates: list[tuple[str, float]], uses: list[Event], one_handle: bool) -> None:
    p_engine, d_engine = engine_description("P", "p" * 32), engine_description("D", "d" * 32)
    network: FakeNetwork
    outbound = Outbound(p_engine, lease=LEASE, clock=lambda: network.now)
    network = FakeNetwork(outbound, fates)
    inbound = Inbound(d_engine, claim_timeout=TIMEOUT, load_timeout=LOAD, allowed=AllowedPeers(), clock=network.clock)
    inbound.attach(network)
    offers = []
    for index in range(len(uses)):
        name = f"cmpl-{index}-0-x"
        blocks = (Blocks(0, (5, 6, 7)), Blocks(0, (8, 9, 10)))
        outbound.offer(Offer(request_id=name, parent=parent_of(name), digest=DIGEST, num_tokens=TOKENS, blocks=blocks))
        offers.append(name)
        handle = Handle(
            engine_id="P", epoch="p" * 32, request_id=offers[0] if one_handle else name, host="127.0.0.1", port=1
        )
        inbound.open(f"d{index}", handle.to_params(num_tokens=TOKENS + 1, tp_size=1), DIGEST, TOKENS)

    network.run_until(TIMEOUT + 0.5, inbound.tick)
    for index, use in enumerate(uses):
        claim = inbound.poll(f"d{index}")
        assert claim is None or claim.state in (State.GRANTED, State.REFUSED)  # no claim waits past its deadline
        if claim is not None and claim.state is State.REFUSED:
            inbound.move(f"d{index}", Event.GIVE_UP)
        elif claim is not None:
            if use is Event.FINISH:
                inbound.move(f"d{index}", Event.LOAD)
            inbound.move(f"d{index}", use)  # LOAD: and then nothing more, for ever
    freed = outbound.take_freed()
    network.run_until(network.now + LOAD + LEASE + TIMEOUT + 15.0, inbound.tick)
    freed += outbound.take_freed()
    assert sorted(freed) == sorted(offers)  # each exactly once, within a lease of the last renewal
    assert inbound.waiting() == len(inbound.leases())  # only loads that have not been reported
    assert [name for name in inbound.leases() if not getattr(inbound.poll(name), "given_up", False)] == []
    assert all(len(tokens) == 1 for tokens in network.grants.values())


def one_claim() -> tuple[FakeNetwork, Outbound, Inbound]:
    """A network that loses nothing, and request `d` that has asked for offer `a`."""
    network: FakeNetwork
    outbound = Outbound(engine_description("P", "p" * 32), lease=LEASE, clock=lambda: network.now)
    network = FakeNetwork(outbound, [])
    inbound = Inbound(
        engine_description("D", "d" * 32),
        claim_timeout=TIMEOUT,
        load_timeout=LOAD,
        allowed=AllowedPeers(),
        clock=network.clock,
    )
    inbound.attach(network)
    blocks = (Blocks(0, (5, 6, 7)), Blocks(0, (8, 9, 10)))
    outbound.offer(Offer(request_id="a", parent=parent_of("a"), digest=DIGEST, num_tokens=TOKENS, blocks=blocks))
    handle = Handle(engine_id="P", epoch="p" * 32, request_id="a", host="127.0.0.1", port=1)
    inbound.open("d", handle.to_params(num_tokens=TOKENS + 1, tp_size=1), DIGEST, TOKENS)
    return network, outbound, inbound


@pytest.mark.parametrize("steps", [True, False])
def test_a_granted_claim_waits_for_blocks_for_as_long_as_the_engine_steps(steps: bool) -> None:
    """In D's queue, behind others, or for ever in an engine that is stuck."""
    network, outbound, inbound = one_claim()

    def tick(now: float) -> None:
        if steps:
            inbound.leases()  # what each step asks
        inbound.tick(now)

    network.run_until(10 * LOAD, tick)
    claim = inbound.poll("d")
    assert claim is not None
    assert (claim.state, claim.reason) == ((State.GRANTED, "") if steps else (State.REFUSED, "lapsed"))
    assert outbound.take_freed() == ([] if steps else ["a"])


def test_an_engine_that_steps_again_within_its_lease_renews_its_claims() -> None:
    network, outbound, inbound = one_claim()
    network.run_until(LOAD + LEASE / 2, inbound.tick)
    inbound.leases()
    network.run_until(LOAD + 2 * LEASE, inbound.tick)
    claim = inbound.poll("d")
    assert claim is not None
    assert claim.state is State.GRANTED
    assert outbound.take_freed() == []
