"""What stands before P's answers: once-only requests and limits. Pure tables; the caller reads the clock.

Both are bounded in memory and forget the least recently seen sender first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

SENDER_BYTES = 8
WINDOW = 1024  # how far behind its newest request a sender's older one may arrive


@dataclass(slots=True)
class _Seen:
    newest: int = -1
    bits: int = 0


class ReplayGuard:
    """Lets every nonce pass once.

    A nonce is a sender's random id (8 bytes, one for each life of a client) and a counter (8 bytes, big endian). Per
    sender the newest counter and a window behind it are kept, so that requests may overtake each other, and nothing
    older than the window passes.
    """

    def __init__(self, max_senders: int = 4096) -> None:
        self._max_senders = max_senders
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def passes(self, nonce: bytes) -> bool:
        """Whether this nonce has not been seen. It has been, afterwards."""
        sender, counter = nonce[:SENDER_BYTES], int.from_bytes(nonce[SENDER_BYTES:], "big")
        seen = self._seen.setdefault(sender, _Seen())
        self._seen.move_to_end(sender)
        if len(self._seen) > self._max_senders:
            self._seen.popitem(last=False)
        if counter > seen.newest:
            shift = counter - seen.newest
            seen.bits = ((seen.bits << shift) | 1) & ((1 << WINDOW) - 1) if shift < WINDOW else 1
            seen.newest = counter
            return True
        age = seen.newest - counter
        if age >= WINDOW or seen.bits >> age & 1:
            return False
        seen.bits |= 1 << age
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """rate: requests a second that one connection may send for long, burst: at once. strangers: the same for all
    connections together that have not sent a valid request yet. max_connections: that are remembered.
    """

    rate: float = 500.0
    burst: float = 2000.0
    strangers: float = 200.0
    max_connections: int = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float

    def take(self, now: float, rate: float, burst: float) -> bool:
        self.tokens = min(burst, self.tokens + (now - self.at) * rate)
        self.at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Throttle:
    """Requests within limits pass; each connection that is known to be a peer has a bucket of its own.

    Strangers share one, so that however many of them come, peers are answered.
    """

    def __init__(self, limits: Limits | None = None, now: float = 0.0) -> None:
        self._limits = limits or Limits()
        self._known: OrderedDict[bytes, _Bucket] = OrderedDict()
        self._strangers = _Bucket(self._limits.strangers, now)

    def __len__(self) -> int:
        return len(self._known)

    def passes(self, connection: bytes, now: float) -> bool:
        """Whether a frame of this connection is to be looked at."""
        limits, bucket = self._limits, self._known.get(connection)
        if bucket is None:
            return self._strangers.take(now, limits.strangers, limits.strangers)
        self._known.move_to_end(connection)
        return bucket.take(now, limits.rate, limits.burst)

    def know(self, connection: bytes, now: float) -> None:
        """This connection has sent a valid request."""
        if connection not in self._known:
            self._known[connection] = _Bucket(self._limits.burst, now)
            if len(self._known) > self._limits.max_connections:
                self._known.popitem(last=False)
