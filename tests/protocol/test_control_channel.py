"""P and D over the real control channel: who may read what, until when, and what a stranger gets."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from connector.control.client import describe, read_reply
from connector.control.peers import AllowedPeers
from connector.errors import ConfigError, PeerUnreachable, ProtocolError, ResourceError
from connector.plan.build import Blocks
from connector.wire.claims import Event, State
from connector.wire.codec import Codec
from connector.wire.guards import Limits
from connector.wire.messages import Describe, Described, EngineDescription, Refused, Reply
from tests.protocol.conftest import DIGEST, HOST, TOKENS, Decode, Prefill, wait_until
from tests.unit.connector.describe import engine_description

Build = Callable[..., Any]


def test_a_claim_is_granted_with_the_blocks_and_released_after_the_load(build: Build) -> None:
    p, d = build(Prefill), build(Decode)
    claim = d.claim(p.offer())
    assert claim.state is State.GRANTED
    assert [group.ids for group in claim.grant.groups] == [(5, 6, 7), (8, 9, 10)]
    peer = d.inbound.peer_of(claim)
    assert peer.geometries[0].num_blocks == 50
    d.inbound.move("d", Event.LOAD)
    assert list(d.inbound.leases()) == ["d"]
    assert p.outbound.open_offers == 1
    d.inbound.move("d", Event.FINISH)
    wait_until(lambda: p.outbound.take_freed() == ["cmpl-1-0-a"])
    assert d.inbound.poll("d") is None
    assert p.outbound.take_counts() == (1, {}, 0)


@pytest.mark.parametrize(
    ("change", "digest", "reason"),
    [
        ({"remote_request_id": "cmpl-2-0-b"}, DIGEST, "unknown"),
        ({}, b"x" * 32, "digest"),
        ({"remote_engine_id": "Q@{epoch}"}, DIGEST, "engine"),
        ({"remote_engine_id": "P@0123"}, DIGEST, "epoch"),
        ({"remote_host": "192.0.2.7"}, DIGEST, "not_allowed"),
        ({"remote_host": "somewhere.example"}, DIGEST, "not_allowed"),
        ({"remote_port": -1}, DIGEST, "malformed"),
    ],
)
def test_a_claim_is_refused_by_reason(build: Build, change: dict[str, Any], digest: bytes, reason: str) -> None:
    p, d = build(Prefill), build(Decode)
    params = p.offer()
    edited = {k: v.format(epoch=p.engine.epoch) if isinstance(v, str) else v for k, v in change.items()}
    claim = d.claim({**params, **edited}, digest=digest)
    assert (claim.state, claim.reason) == (State.REFUSED, reason)
    again = d.claim(params, request_id="good")  # the offer is still there for its own request
    assert again.state is State.GRANTED


@pytest.mark.parametrize(
    "lacking",
    [
        (Blocks(0, (5, 6, 7)), Blocks(0, ())),
        (Blocks(0, (5, 6, 7)), Blocks(1, (9, 10))),
        (Blocks(2, (7,)), Blocks(0, (8, 9, 10))),
        (Blocks(0, (5, 6, 7)), Blocks(0, (8, 9, 5000))),
        (Blocks(0, (5, 6, 7)),),
    ],
)
def test_a_grant_without_all_live_blocks_of_every_group_brings_no_tokens(
    build: Build, lacking: tuple[Blocks, ...]
) -> None:
    """W13: one group is complete, the other one is missing, short or outside of the cache."""
    p, d = build(Prefill), build(Decode)
    claim = d.claim(p.offer(blocks=lacking))
    assert (claim.state, claim.reason) == (State.REFUSED, "malformed")
    wait_until(lambda: p.outbound.open_offers == 0)  # given back at once


def test_a_silent_port_ends_within_the_claim_timeout(build: Build) -> None:
    p, d = build(Prefill), build(Decode, claim_timeout=0.2)
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        started = time.monotonic()
        claim = d.claim({**p.offer(), "remote_port": silent.getsockname()[1]})
        assert (claim.state, claim.reason) == (State.REFUSED, "timeout")
        assert time.monotonic() - started < 2.0


def test_a_port_that_nobody_listens_on_is_known_at_once(build: Build) -> None:
    p, d = build(Prefill), build(Decode, claim_timeout=60.0)
    params = p.offer()
    p.close()
    started = time.monotonic()
    claim = d.claim(params)
    assert (claim.state, claim.reason) == (State.REFUSED, "unreachable")
    assert time.monotonic() - started < 5.0


def test_a_question_whose_connection_breaks_does_not_wait_for_its_deadline(build: Build) -> None:
    p, d = build(Prefill), build(Decode, claim_timeout=60.0)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        d.inbound.open("d", {**p.offer(), "remote_port": port}, DIGEST, TOKENS)
        connection, _ = server.accept()
        connection.recv(64)
        started = time.monotonic()
        connection.close()
    wait_until(lambda: (claim := d.inbound.poll("d")) is not None and claim.reason == "unreachable")
    assert time.monotonic() - started < 5.0
    params = build(Prefill, port=port).offer()  # whoever listens there next is asked as ever, after a pause
    wait_until(lambda: d.claim(params, request_id=os.urandom(4).hex()).state is State.GRANTED)


def test_a_claim_that_comes_before_the_digests_is_granted_once_they_are_there(build: Build) -> None:
    p, d = build(Prefill), build(Decode)
    claim = d.inbound.open("d", p.offer(digests=None), DIGEST, TOKENS)
    time.sleep(0.1)
    assert d.inbound.poll("d").state is State.ASKED
    assert p.outbound.take_counts() == (0, {}, 0)
    p.outbound.publish("cmpl-1-0-a", (b"one", b"two"))
    wait_until(lambda: d.inbound.poll("d").state is State.GRANTED)
    assert [group.digests for group in claim.grant.groups] == [b"one", b"two"]


def test_digests_that_never_come_end_with_the_claim_timeout(build: Build) -> None:
    p, d = build(Prefill, lease=0.5), build(Decode, claim_timeout=0.2)
    claim = d.claim(p.offer(digests=None))
    assert claim.reason == "timeout"
    wait_until(lambda: p.outbound.take_freed() == ["cmpl-1-0-a"])
    p.outbound.publish("cmpl-1-0-a", (b"", b""))  # too late, and nothing happens


def test_renewals_keep_a_claim_beyond_its_first_lease(build: Build) -> None:
    p, d = build(Prefill, lease=0.3), build(Decode)
    claim = d.claim(p.offer())
    d.inbound.move("d", Event.LOAD)
    first = claim.valid_until
    wait_until(lambda: d.inbound.leases()["d"] > first + 0.3)
    assert p.outbound.take_freed() == []
    assert p.outbound.open_offers == 1


def test_a_load_that_never_ends_keeps_its_blocks_for_no_longer_than_its_timeout_and_a_lease(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reports the load, while D's engine steps and its control channel would renew the claim for ever."""
    p, d = build(Prefill, lease=0.3), build(Decode, load_timeout=0.6)
    claim = d.claim(p.offer())
    started = time.monotonic()
    d.inbound.move("d", Event.LOAD)
    wait_until(lambda: d.inbound.leases() and p.outbound.take_freed() == ["cmpl-1-0-a"])
    assert 0.6 < time.monotonic() - started < 3.0
    assert p.outbound.take_counts() == (1, {}, 1)  # expired on P, as if D had died
    assert claim.state is State.LOADING  # D's own blocks stay until the worker has seen its reads end
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm.hma.claims"]
    assert line == "Request d: its load has not ended within 0.6 s; the claim is renewed no more"
    d.inbound.move("d", Event.FINISH)
    assert d.inbound.waiting() == 0


def test_an_engine_that_steps_no_more_keeps_granted_blocks_for_no_longer_either(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """D's engine waits for its worker in the step in which the grant arrives: nobody asks for the claim."""
    p, d = build(Prefill, lease=0.3), build(Decode, load_timeout=0.6)
    d.claim(p.offer())
    started = time.monotonic()
    wait_until(lambda: p.outbound.take_freed() == ["cmpl-1-0-a"])
    assert 0.4 < time.monotonic() - started < 3.0
    assert [record.getMessage() for record in caplog.records if record.name == "vllm.hma.claims"] == [
        "The engine has not stepped for 0.6 s while 1 request(s) wait; their claims are renewed no more"
    ]
    claim = d.inbound.poll("d")
    assert (claim.state, claim.reason) == (State.REFUSED, "lapsed")  # and the request falls back as it always does


def test_the_next_load_from_the_same_peer_is_renewed_beside_one_that_never_ends(build: Build) -> None:
    p, d = build(Prefill, lease=0.3), build(Decode, load_timeout=0.5)
    d.claim(p.offer("cmpl-1-0-a"), "stuck")
    d.inbound.move("stuck", Event.LOAD)
    wait_until(lambda: d.inbound.leases() and p.outbound.take_freed() == ["cmpl-1-0-a"])
    late = d.claim(p.offer("cmpl-2-0-b"), "good")
    d.inbound.move("good", Event.LOAD)
    first = late.valid_until
    wait_until(lambda: d.inbound.leases()["good"] > first)
    assert p.outbound.open_offers == 1


def test_a_claim_that_p_has_dropped_is_lost_on_d(build: Build) -> None:
    p, d = build(Prefill, lease=0.3), build(Decode)
    claim = d.claim(p.offer())
    d.inbound.move("d", Event.LOAD)
    p.outbound._table.release(["cmpl-1-0-a"], d.engine.epoch, 0.0)
    wait_until(lambda: d.inbound.leases()["d"] == 0.0)
    assert claim.state is State.LOADING  # until the worker has seen its reads end


@pytest.mark.parametrize("event", [Event.CANCEL, Event.SKIP])
def test_a_claim_that_is_not_used_is_given_back(build: Build, event: Event) -> None:
    p, d = build(Prefill), build(Decode)
    d.claim(p.offer())
    d.inbound.move("d", event)
    wait_until(lambda: p.outbound.take_freed() == ["cmpl-1-0-a"])


def test_a_grant_that_comes_after_the_client_has_left_is_given_back(build: Build) -> None:
    p, d = build(Prefill), build(Decode)
    d.inbound.open("d", p.offer(), DIGEST, 47)
    d.inbound.move("d", Event.CANCEL)
    wait_until(lambda: p.outbound.take_freed() == ["cmpl-1-0-a"])
    assert d.inbound.waiting() == 0


def test_a_request_that_d_s_server_refuses_gives_the_offer_back_unless_it_is_claimed(build: Build) -> None:
    """L1: D never sees the prompt, and P has its blocks back at once."""
    p, d = build(Prefill), build(Decode)
    params = p.offer()
    d.inbound.decline({**params, "remote_port": "none"})
    d.inbound.decline(params)
    wait_until(lambda: p.outbound.open_offers == 0)
    claimed = p.offer("cmpl-2-0-b")
    assert d.claim(claimed).state is State.GRANTED
    d.inbound.decline(claimed)
    d.inbound.decline(params)
    assert d.claim(p.offer("cmpl-3-0-c"), request_id="later").state is State.GRANTED
    assert p.outbound.open_offers == 2


def test_closing_d_gives_back_what_it_holds(build: Build) -> None:
    p, d = build(Prefill), build(Decode)
    d.claim(p.offer())
    d.close()
    wait_until(lambda: p.outbound.take_freed() == ["cmpl-1-0-a"])


def test_one_handle_for_a_list_serves_each_prompt_from_its_own_offer(build: Build) -> None:
    p, d = build(Prefill), build(Decode)
    digests = [bytes([i]) * 32 for i in range(3)]
    params = [p.offer(f"cmpl-9-{i}-x{i}", digest) for i, digest in enumerate(digests)]
    claims = [d.claim(params[0], request_id=f"d{i}", digest=digest) for i, digest in enumerate(digests)]
    assert [claim.grant.request_id for claim in claims] == [f"cmpl-9-{i}-x{i}" for i in range(3)]


def test_a_restarted_p_on_the_same_port_is_noticed_and_described_again(build: Build) -> None:
    first, d = build(Prefill), build(Decode)
    old = first.offer()
    assert d.claim(old, request_id="one").state is State.GRANTED
    first.close()
    second = build(Prefill, port=first.server.port)
    new = second.offer("cmpl-2-0-b")
    assert d.claim(new, request_id="two").state is State.GRANTED
    assert d.inbound.take_dropped() == [first.engine.epoch]
    late = d.claim(old, request_id="three")
    assert (late.state, late.reason) == (State.REFUSED, "epoch")


def test_an_engine_that_does_not_fit_is_refused_before_a_claim_with_field_and_remedy(build: Build) -> None:
    raw = msgspec.to_builtins(engine_description("P", "p" * 32))
    raw["fields"]["kv_dtype"] = "fp8"
    p, d = build(Prefill, engine=msgspec.convert(raw, EngineDescription)), build(Decode)
    claim = d.claim(p.offer())
    assert (claim.state, claim.reason) == (State.REFUSED, "incompatible")
    for part in ("kv_dtype", "fp8", "auto", "--kv-cache-dtype"):
        assert part in claim.detail
    assert p.outbound.take_counts()[0] == 0


KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.mark.parametrize(
    ("p_keys", "d_keys", "state"),
    [
        ((KEY,), (KEY,), "granted"),
        ((KEY, OTHER), (OTHER,), "granted"),
        ((OTHER,), (OTHER, KEY), "granted"),
        ((OTHER, KEY), (KEY, OTHER), "granted"),
        ((KEY,), (), "refused"),
        ((KEY,), (OTHER,), "refused"),
        ((), (KEY,), "refused"),
    ],
    ids=["same", "P knows the old one too", "D knows the old one too", "both", "no key", "wrong key", "key on D only"],
)
def test_authentication(build: Build, p_keys: tuple[bytes, ...], d_keys: tuple[bytes, ...], state: str) -> None:
    p, d = build(Prefill, keys=p_keys), build(Decode, keys=d_keys, claim_timeout=0.4 if state == "refused" else 5.0)
    claim = d.claim(p.offer())
    assert claim.state == state
    if state == "refused":
        refused = p.outbound.take_counts()[1]
        assert refused.get("unauthorised", 0) >= 1
        assert d.inbound.peer_of(claim) is None


class Recorder:
    """A raw socket that sends what it is told and remembers what came back."""

    def __init__(self, port: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://{HOST}:{port}")

    def ask(self, frame: bytes, codec: Codec, wait_ms: int = 2000) -> Reply | None:
        self.socket.send(frame)
        return read_reply(codec, self.socket.recv())[0] if self.socket.poll(wait_ms) else None

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_a_recorded_exchange_is_worth_nothing_to_whoever_replays_it(build: Build) -> None:
    """X2: neither to the same life of the server nor to the next one."""
    p = build(Prefill, keys=(KEY,))
    codec, recorder = Codec((KEY,)), build(Recorder, port=p.server.port)
    first = recorder.ask(codec.request(Describe())[0], codec)
    assert isinstance(first, Refused)
    assert (first.reason, len(first.salt)) == ("unauthorised", 16)
    frame, _ = codec.request(Describe(), first.salt)
    assert isinstance(recorder.ask(frame, codec), Described)
    again = recorder.ask(frame, codec)
    assert isinstance(again, Refused)
    assert again.reason == "replayed"
    p.close()
    reborn = build(Prefill, keys=(KEY,))
    later = build(Recorder, port=reborn.server.port).ask(frame, codec)
    assert isinstance(later, Refused)
    assert later.reason == "unauthorised"


def test_a_client_seals_anew_for_a_restarted_server(build: Build) -> None:
    first, d = build(Prefill, keys=(KEY,)), build(Decode, keys=(KEY,))
    assert d.claim(first.offer(), request_id="one").state is State.GRANTED
    first.close()
    second = build(Prefill, keys=(KEY,), port=first.server.port)
    assert d.claim(second.offer("cmpl-2-0-b"), request_id="two").state is State.GRANTED


def test_a_flood_of_strangers_does_not_keep_a_peer_from_its_answer(build: Build) -> None:
    """X1: 3,000 frames from 30 connections, and a peer that asks in the middle of them."""
    limits = Limits(rate=100.0, burst=100.0, strangers=50.0)
    p, d = build(Prefill, server_options={"limits": limits}), build(Decode)
    assert d.claim(p.offer("cmpl-0-0-a"), request_id="before").state is State.GRANTED
    strangers = [build(Recorder, port=p.server.port) for _ in range(30)]
    for _ in range(100):
        for stranger in strangers:
            stranger.socket.send(b"HMA" + bytes(40))
    assert d.claim(p.offer("cmpl-1-0-b"), request_id="amid").state is State.GRANTED
    wait_until(lambda: p.outbound._refused["throttled"] >= 1000, 10.0)
    assert d.claim(p.offer("cmpl-2-0-c"), request_id="after").state is State.GRANTED


def test_a_peer_over_its_rate_is_throttled_and_comes_back(build: Build) -> None:
    p = build(Prefill, server_options={"limits": Limits(rate=50.0, burst=20.0, strangers=20.0)})
    codec, recorder = Codec(), build(Recorder, port=p.server.port)
    answers = [recorder.ask(codec.request(Describe())[0], codec, wait_ms=200) for _ in range(40)]
    assert sum(answer is None for answer in answers) >= 1
    assert p.outbound.take_counts()[1]["throttled"] >= 1
    time.sleep(0.3)
    assert isinstance(recorder.ask(codec.request(Describe())[0], codec), Described)


def test_p_answers_only_allowed_addresses(build: Build) -> None:
    p = build(Prefill, server_options={"allowed": AllowedPeers(["192.0.2.0/24"])})
    with pytest.raises(ProtocolError, match=r"not_allowed.*127\.0\.0\.1"):
        describe(HOST, p.server.port, timeout=2.0)
    assert p.outbound.take_counts()[1] == {"not_allowed": 1}
    named = build(Prefill, server_options={"allowed": AllowedPeers(["localhost"])})
    assert describe(HOST, named.server.port, timeout=2.0) == named.engine


def test_a_silent_peer_is_left_alone_for_a_while_and_then_asked_again(build: Build) -> None:
    p, d = build(Prefill), build(Decode, claim_timeout=0.3)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind((HOST, 0))
        silent.listen()
        port = silent.getsockname()[1]
        handle = {**p.offer(), "remote_port": port}
        assert d.claim(handle, request_id="first").reason == "timeout"
        wait_until(lambda: d.inbound._away)
        started = time.monotonic()
        assert d.claim(handle, request_id="second").reason == "unreachable"
        assert time.monotonic() - started < 0.2
    reborn = build(Prefill, port=port)
    time.sleep(0.6)
    assert d.claim(reborn.offer(), request_id="third").state is State.GRANTED
    assert d.claim(reborn.offer("cmpl-2-0-b"), request_id="fourth").state is State.GRANTED


def test_a_handle_that_leads_to_the_engine_itself_says_so(build: Build) -> None:
    """S3."""
    engine = engine_description("P", uuid.uuid4().hex)
    p, d = build(Prefill, engine=engine), build(Decode, engine=engine)
    claim = d.claim(p.offer())
    assert claim.reason == "engine"
    for part in ("this engine itself", str(p.server.port), "advertised_host", "control_port"):
        assert part in claim.detail


def test_a_stranger_learns_nothing_but_unauthorised(build: Build) -> None:
    p = build(Prefill, keys=(KEY,))
    with pytest.raises(ProtocolError) as caught:
        describe(HOST, p.server.port, timeout=2.0, codec=Codec())
    assert p.engine.epoch not in str(caught.value)
    assert describe(HOST, p.server.port, timeout=2.0, codec=Codec((KEY,))) == p.engine


def test_describe_says_when_nobody_answers() -> None:
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        with pytest.raises(PeerUnreachable, match="No answer"):
            describe(HOST, silent.getsockname()[1], timeout=0.1)


def test_whatever_is_thrown_at_the_server_it_keeps_answering(build: Build) -> None:
    p = build(Prefill)
    junk = [b"", b"\x00" * 10, os.urandom(2000), b"HMA\x01\x00" + os.urandom(100), b"HMA\x09\x00" + bytes(40)]
    with zmq.Context() as context:
        sockets = []
        for index in range(60):
            peer = context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(f"tcp://{HOST}:{p.server.port}")
            peer.send(junk[index % len(junk)])
            peer.send_multipart([b"a", b"b", b"c"])
            sockets.append(peer)
        sockets[0].send(bytes(9 << 20))  # over the limit of a frame: the connection is cut
        for _ in range(200):
            with socket.create_connection((HOST, p.server.port), timeout=2) as raw:
                raw.sendall(os.urandom(50))
        assert describe(HOST, p.server.port, timeout=5.0) == p.engine
        for peer in sockets:
            peer.close()
    assert p.outbound.take_counts()[1]["malformed"] >= 60


def test_a_taken_port_is_told_with_the_setting(build: Build) -> None:
    p = build(Prefill)
    with pytest.raises(ResourceError, match=str(p.server.port)) as caught:
        Prefill(port=p.server.port)
    assert "control_port" in caught.value.remedy


def test_allowed_peers() -> None:
    assert AllowedPeers().resolve("localhost") == "127.0.0.1"
    assert AllowedPeers().resolve("127.9.9.9") == "127.9.9.9"
    assert AllowedPeers().resolve("::1") == "::1"
    assert AllowedPeers().resolve("10.0.0.1") is None
    assert AllowedPeers().resolve("\x00") is None
    assert AllowedPeers(["10.0.0.0/8", "prefill.local"]).resolve("10.1.2.3") == "10.1.2.3"
    assert AllowedPeers(["prefill.local"]).resolve("prefill.local") == "prefill.local"
    with pytest.raises(ConfigError):
        AllowedPeers(["10.0.0.0/99"])
