"""What is fuzzed: functions of bytes that may raise the errors of their interface, and nothing else.

`python -m tests.fuzz TARGET [libFuzzer options]` runs one under atheris, guided by coverage; the seeds in
`tests/fuzz/seeds/TARGET` are where it starts, and where inputs that found something are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from connector.errors import ConfigError, HmaError, ProtocolError
from connector.plan.build import Blocks
from connector.plan.join import join
from connector.transport.faulty import Faults
from connector.wire.claims import Event, InboundClaim
from connector.wire.claims import State as ClaimState
from connector.wire.codec import Codec
from connector.wire.compare import compare
from connector.wire.described import geometry_of
from connector.wire.guards import ReplayGuard
from connector.wire.handle import Handle
from connector.wire.messages import Claim, Described, Granted, encoder
from connector.wire.offers import Offer, OfferTable, Refusal
from tests.unit.connector.describe import engine_description

SEEDS = Path(__file__).parent / "seeds"
KEYED = Codec((b"k" * 32,))


def frames(data: bytes) -> None:
    """Frames as they come from a socket, with and without a key."""
    for codec in (Codec(), KEYED):
        for read in (codec.read_request, codec.read_reply, codec.read_salt):
            with suppress(ProtocolError):
                read(data)
        assert len(codec.nonce_of(data)) == 16


def bodies(data: bytes) -> None:
    """Message bodies behind a good header: what passes is a message, and what it describes is compared or refused."""
    head = Codec().reply(Described(engine=OURS), bytes(16))[: 5 + 16]
    with suppress(ProtocolError):
        Codec().read_request(head + data)
    try:
        reply, _ = Codec().read_reply(head + data)
    except ProtocolError:
        return
    assert encoder.encode(reply)
    if isinstance(reply, Described):
        compare(OURS, reply.engine)
        with suppress(ConfigError):
            join(geometry_of(OURS), [geometry_of(reply.engine)])


def handles(data: bytes) -> None:
    """Handles as a router passes them on: any JSON."""
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        with suppress(ProtocolError):
            handle = Handle.from_params(value)
            assert handle.host and 0 < handle.port < 1 << 16


def schedules(data: bytes) -> None:
    """Fault schedules."""
    with suppress(HmaError):
        Faults.parse(data.decode(errors="replace")).draw(0)


def offers(data: bytes) -> None:
    """Any sequence of events at P's table: an offer's blocks go back exactly once, and none is granted after that."""
    table, now, made = OfferTable(epoch="e", lease=4.0), 0.0, 0
    freed: list[str] = []
    for byte in data[:400]:
        event, who = byte & 7, byte >> 3 & 3
        now += byte >> 5
        name = f"r-{made - who}"
        if event == 0:
            made += 1
            table.add(
                Offer(request_id=f"r-{made}", parent="r", digest=bytes(32), num_tokens=9, blocks=(Blocks(0, (1,)),)),
                now,
            )
        elif event in (1, 2):
            claim = Claim(
                request_id=name,
                epoch="e",
                claimant=f"d{event}",
                token=f"t{who}",
                digest=bytes(32),
                fingerprint=bytes(32),
            )
            answer = table.claim(claim, now, bytes(32))
            assert not isinstance(answer, Granted) or answer.request_id not in freed
        elif event == 3:
            table.renew([name], "d1", now)
        elif event == 4:
            table.release([name, name], "d1", now)
        elif event == 5:
            table.decline(name, now)
        else:
            table.expire(now)
        freed += table.take_freed()
    table.expire(now + 100)
    freed += table.take_freed()
    assert sorted(freed) == sorted({f"r-{number}" for number in range(1, made + 1)})


def claims(data: bytes) -> None:
    """Any sequence of events at a claim of D: it never becomes loadable after it was refused or has ended."""
    handle = Handle(engine_id="P", epoch="e", request_id="r", host="h", port=1)
    claim = InboundClaim("r", handle, bytes(32), 9, 5.0)
    grant = Granted(request_id="r", num_tokens=9, valid_seconds=3.0, groups=())
    now, ended = 0.0, False
    for byte in data[:200]:
        now += byte >> 6
        match byte & 3:
            case 0:
                claim.granted(grant, now)
            case 1:
                claim.refused(Refusal.UNKNOWN)
            case 2:
                claim.move(list(Event)[(byte >> 2) % len(Event)])
            case _:
                claim.tick(now)
        ended = ended or claim.state in (ClaimState.OVER, ClaimState.REFUSED)
        assert not ended or claim.state in (ClaimState.OVER, ClaimState.REFUSED)


def replays(data: bytes) -> None:
    """Nonces in any order: none passes twice."""
    guard, passed = ReplayGuard(max_senders=1 << 20), set()
    for start in range(0, len(data) - 1, 2):
        nonce = bytes(7) + data[start : start + 1] + bytes(7) + data[start + 1 : start + 2]
        if guard.passes(nonce):
            assert nonce not in passed
            passed.add(nonce)


OURS = engine_description()
TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (frames, bodies, handles, schedules, offers, claims, replays)
}
