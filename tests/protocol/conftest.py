"""P's and D's control planes over real loopback sockets, without vLLM."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from connector.control.client import ControlClient
from connector.control.inbound import Inbound
from connector.control.outbound import Outbound
from connector.control.peers import AllowedPeers
from connector.control.server import ControlServer
from connector.plan.build import Blocks
from connector.wire.claims import InboundClaim
from connector.wire.codec import Codec
from connector.wire.handle import Handle
from connector.wire.messages import EngineDescription
from connector.wire.offers import Offer, parent_of
from tests.unit.connector.describe import engine_description

HOST = "127.0.0.1"
TOKENS = 47
DIGEST = b"d" * 32


def wait_until(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    """The first true value of `condition`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
    return value


@dataclass
class Prefill:
    """P: offers and their server."""

    keys: tuple[bytes, ...] = ()
    port: int = 0
    lease: float = 30.0
    server_options: dict[str, Any] = field(default_factory=dict)
    engine: EngineDescription = field(default_factory=lambda: engine_description("P", uuid.uuid4().hex))

    def __post_init__(self) -> None:
        self.outbound = Outbound(self.engine, lease=self.lease)
        self.server = ControlServer(
            HOST, self.port, Codec(self.keys), self.outbound.handle, self.outbound.count_refused, **self.server_options
        )

    def offer(
        self,
        request_id: str = "cmpl-1-0-a",
        digest: bytes = DIGEST,
        digests: tuple[bytes, ...] | None = (),
        blocks: tuple[Blocks, ...] = (Blocks(0, (5, 6, 7)), Blocks(0, (8, 9, 10))),
    ) -> dict[str, Any]:
        """Make an offer; returns the parameters that a router would carry."""
        self.outbound.offer(
            Offer(
                request_id=request_id,
                parent=parent_of(request_id),
                digest=digest,
                num_tokens=TOKENS,
                blocks=blocks,
                digests=digests,
            )
        )
        handle = Handle(
            engine_id=self.engine.engine_id,
            epoch=self.engine.epoch,
            request_id=request_id,
            host=HOST,
            port=self.server.port,
        )
        return handle.to_params(num_tokens=TOKENS + 1, tp_size=1)

    def close(self) -> None:
        self.server.close()


@dataclass
class Decode:
    """D: claims and their client."""

    keys: tuple[bytes, ...] = ()
    claim_timeout: float = 2.0
    load_timeout: float = 60.0
    engine: EngineDescription = field(default_factory=lambda: engine_description("D", uuid.uuid4().hex))

    def __post_init__(self) -> None:
        self.inbound = Inbound(
            self.engine, claim_timeout=self.claim_timeout, load_timeout=self.load_timeout, allowed=AllowedPeers()
        )
        self.client = ControlClient(Codec(self.keys), self.inbound.tick)
        self.inbound.attach(self.client)

    def claim(self, params: dict[str, Any], request_id: str = "d", digest: bytes = DIGEST) -> InboundClaim:
        """Open a claim and wait for its answer."""
        self.inbound.open(request_id, params, digest, TOKENS)
        return wait_until(lambda: (c := self.inbound.poll(request_id)) is not None and c.state != "asked" and c)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.inbound.close()
        self.client.close()


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Makes sides that are closed at the end of the test: `build(Prefill, lease=0.3)`."""
    made: list[Any] = []

    def make(kind: type, **options: Any) -> Any:
        made.append(kind(**options))
        return made[-1]

    yield make
    for side in reversed(made):
        side.close()
