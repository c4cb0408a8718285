"""A transport with planned misfortune: wraps any other one and injects faults by a seeded schedule.

For tests and rehearsals. A schedule is a short text, `refuse:0.1,corrupt:0.05,late:0.2:0.5,seed:7`:

    refuse:P            a post is refused
    fail:P              a read fails after its bytes may have arrived in part
    corrupt:P           a read succeeds and one byte of one row is wrong
    late:P:SECONDS      a read takes that much longer to end
    hang:P              a read never ends by itself
    seed:N              of the draws; the n-th post of a run meets the same fate in every run
    limit:N             faults in all, then none

P is a share of all posts, from 0 to 1. What was really injected is counted by name.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connector.errors import ConfigError, TransportError
from connector.plan.geometry import Region, Rows, Strip
from connector.transport.base import Connection, Progress, Read, Telemetry, Transport

SHARES = ("refuse", "fail", "corrupt", "late", "hang")
_REMEDY = "For example: refuse:0.1,late:0.2:0.5,seed:7. Faults: " + ", ".join(SHARES) + "; besides seed and limit."


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A schedule. shares: fault to the share of posts that it hits, at most 1 in all. seconds: of a late read."""

    shares: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    seed: int = 0
    limit: int | None = None

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read a schedule. ConfigError that names the part that cannot be read."""
        shares: dict[str, float] = {}
        seconds, seed, limit = 0.0, 0, None
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, *values = part.split(":")
            try:
                match name, values:
                    case "seed", [value]:
                        seed = int(value)
                    case "limit", [value] if int(value) >= 0:
                        limit = int(value)
                    case "late", [share, delay] if 0 <= float(share) <= 1 and 0 <= float(delay) <= 3600:
                        shares[name], seconds = float(share), float(delay)
                    case _, [share] if name in SHARES and name != "late" and 0 <= float(share) <= 1:
                        shares[name] = float(share)
                    case _:
                        raise ValueError
            except ValueError:
                raise ConfigError(f"Not a fault: {part!r}.", remedy=_REMEDY) from None
        if sum(shares.values()) > 1:
            raise ConfigError("The shares of all faults add up to more than 1.", remedy=_REMEDY)
        return cls(shares=tuple(shares.items()), seconds=seconds, seed=seed, limit=limit)

    def draw(self, number: int) -> str:
        """What happens to post `number`: a fault's name, or an empty text."""
        point = random.Random(f"{self.seed}/{number}").random()
        for name, share in self.shares:
            if point < share:
                return name
            point -= share
        return ""


class FaultyTransport:
    """Another transport, with faults. on_fault: told the name of each fault as it happens."""

    def __init__(
        self,
        inner: Transport,
        faults: Faults,
        *,
        on_fault: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if inner.memory != "DRAM" and "corrupt" in dict(faults.shares):
            raise ConfigError(f"Pages in {inner.memory} cannot be corrupted from here.", remedy="Leave corrupt out.")
        self.kind, self.memory = inner.kind, inner.memory
        self.injected: Counter[str] = Counter()
        self._inner, self._faults, self._clock = inner, faults, clock
        self._on_fault = on_fault
        self._posts = 0

    def register(self, regions: Sequence[Region]) -> bytes:
        return self._inner.register(regions)

    def connect(self, connection_data: bytes, local: Sequence[Strip], remote: Sequence[Strip]) -> FaultyConnection:
        return FaultyConnection(self, self._inner.connect(connection_data, local, remote), tuple(local))

    def close(self) -> None:
        self._inner.close()

    def plan(self, faults: Faults) -> None:
        """Follow another schedule from the next post on."""
        self._faults, self._posts = faults, 0
        self.injected.clear()

    def next_fault(self) -> str:
        """Draw the fate of the next post, and count it."""
        number, self._posts = self._posts, self._posts + 1
        spent = self._faults.limit is not None and sum(self.injected.values()) >= self._faults.limit
        fault = "" if spent else self._faults.draw(number)
        if fault:
            self.injected[fault] += 1
            if self._on_fault is not None:
                self._on_fault(fault)
        return fault

    def make(self, fault: str, read: Read, strips: tuple[Strip, ...], local: Rows) -> Read:
        """The read that meets this fate."""
        match fault:
            case "fail":
                return _Failing(read)
            case "hang":
                return _Delayed(read, self._clock, float("inf"))
            case "late":
                return _Delayed(read, self._clock, self._clock() + self._faults.seconds)
            case "corrupt":
                return _Corrupting(read, strips, local)
        return read


class FaultyConnection:
    """A peer whose reads may go wrong."""

    def __init__(self, transport: FaultyTransport, inner: Connection, strips: tuple[Strip, ...]) -> None:
        self._transport, self._inner, self._strips = transport, inner, strips

    def read(self, local: Rows, remote: Rows) -> Read:
        fault = self._transport.next_fault()
        if fault == "refuse":
            raise TransportError("A planned fault: the post is refused.")
        return self._transport.make(fault, self._inner.read(local, remote), self._strips, local)

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class _Passing:
    """A read as it is; the faults below change one thing of it."""

    inner: Read

    def poll(self) -> Progress:
        return self.inner.poll()

    def telemetry(self) -> Telemetry:
        return self.inner.telemetry()

    def close(self) -> bool:
        return self.inner.close()


class _Failing(_Passing):
    """Fails once its bytes have arrived."""

    def poll(self) -> Progress:
        return Progress.PENDING if self.inner.poll() is Progress.PENDING else Progress.FAILED


@dataclass(slots=True)
class _Delayed(_Passing):
    """Tells of its end only after `until`."""

    clock: Callable[[], float]
    until: float

    def poll(self) -> Progress:
        progress = self.inner.poll()
        return progress if self.clock() >= self.until else Progress.PENDING


@dataclass(slots=True)
class _Corrupting(_Passing):
    """Changes one byte in the middle of what was read, once it is there."""

    strips: tuple[Strip, ...]
    local: Rows
    done: bool = field(default=False)

    def poll(self) -> Progress:
        progress = self.inner.poll()
        if progress is Progress.DONE and not self.done:
            self.done = True
            strip, block = divmod(int(self.local[len(self.local) // 2]), self.strips[0].count)
            page = self.strips[strip]
            byte = ctypes.c_ubyte.from_address(page.base + block * page.stride + page.num_bytes // 2)
            byte.value ^= 0xFF
        return progress
