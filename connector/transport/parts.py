"""One part of a load: rows that are posted, watched and posted again together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from connector.errors import TransportError
from connector.plan.geometry import Rows
from connector.transport.base import Connection, Progress, Read, Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What is done about a part that failed.

    max_attempts: posts of one part, the first among them. backoff: seconds before the second post; each further one
    waits twice as long, `max_backoff` at most. read_timeout: seconds until a read that does not end counts as failed.
    """

    max_attempts: int = 4
    backoff: float = 0.02
    max_backoff: float = 1.0
    read_timeout: float = 20.0

    def pause(self, attempts: int) -> float:
        """Seconds to wait after `attempts` posts have failed."""
        return float(min(self.max_backoff, self.backoff * 2 ** (attempts - 1)))


class Failure(StrEnum):
    """How one post of a part failed; labels of metrics."""

    REFUSED = "refused"
    FAILED = "failed"
    TIMEOUT = "timeout"
    DIGEST = "digest"


@dataclass(slots=True)
class Part:
    """local, remote: rows. num_bytes: of them. source: which of the peer's ranks, in the loader's order. is_repair: of
    pages that have arrived once, and wrongly.

    attempts: posts so far. failure: of the last one, None while all is well. retry_at: when to post again.

    A part is quiet when nothing of it is being written: only then may its blocks change hands.
    """

    local: Rows
    remote: Rows
    num_bytes: int
    source: int = 0
    is_repair: bool = False
    attempts: int = 0
    failure: Failure | None = None
    detail: str = ""
    done: Telemetry | None = None
    retry_at: float = 0.0
    connection: Connection | None = None
    _read: Read | None = None
    _deadline: float = 0.0

    @property
    def is_quiet(self) -> bool:
        return self._read is None

    def post(self, connection: Connection, now: float, recovery: Recovery) -> None:
        """Post the rows once more. A refused post is a failure like any other."""
        self.attempts += 1
        self.connection, self.failure = connection, None
        self._deadline = now + recovery.read_timeout
        try:
            self._read = connection.read(self.local, self.remote)
        except TransportError as error:
            self._fail(Failure.REFUSED, str(error), now, recovery)

    def look(self, now: float, recovery: Recovery, *, wanted: bool) -> None:
        """Ask the read where it stands. One that is not wanted any more, or takes too long, is cancelled; where that
        cannot be done it is awaited."""
        if self._read is None:
            return
        progress = self._read.poll()
        if progress is Progress.DONE:
            self.done = self._read.telemetry()
        late = progress is Progress.PENDING and now >= self._deadline
        if progress is Progress.PENDING and wanted and not late:
            return
        if not self._read.close():
            return
        self._read = None
        if self.done is None:
            self._fail(Failure.TIMEOUT if late else Failure.FAILED, "", now, recovery)

    def stop(self) -> None:
        """Cancel a read at the engine's end; what cannot be cancelled is left to the transport's own end."""
        if self._read is not None:
            self._read.close()

    def _fail(self, failure: Failure, detail: str, now: float, recovery: Recovery) -> None:
        self.failure, self.detail = failure, detail
        self.retry_at = now + recovery.pause(self.attempts)
