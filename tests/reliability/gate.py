"""A TCP forwarder between a decode server and a prefill server's control port, which can be shut."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

Mode = Literal["open", "closed", "silent"]


class Gate:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`. closed: every connection ends at once, as if nobody listened.
    silent: connections stand and nothing comes through, as if a firewall had swallowed it."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target, self._mode = target, "open"
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Gate:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.set("closed")
        assert self._server is not None
        self._server.close()

    def set(self, mode: Mode) -> None:
        """Change what happens to connections, those that stand included."""
        self._mode = mode
        if mode == "closed":
            for link in self._links:
                link.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            if self._mode == "closed":
                return
            inward, outward = await asyncio.open_connection("127.0.0.1", self._target)
            with contextlib.closing(outward):
                ways = ((reader, outward), (inward, writer))
                both = [asyncio.create_task(self._copy(source, sink)) for source, sink in ways]
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in both:
                        one.cancel()
        self._links.discard(link)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self._mode == "open":
                    sink.write(data)
                    await sink.drain()
