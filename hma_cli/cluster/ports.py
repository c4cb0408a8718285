"""Free, distinct TCP ports, held by bound sockets until the process that needs one is about to start."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

from connector.errors import ResourceError

_LOWEST = 20_000
_ATTEMPTS = 500


class Ports:
    """Reserves ports. A reserved port is bound (not listening), so nobody else gets it; `release` gives it away.

    Picked ports lie below the kernel's ephemeral range: no outgoing connection of another process can take one in the
    moments between release and the server's own bind. Close it, or use it as a context manager.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *_: object) -> None:
        self.release(*self._held)

    def take(self, port: int, host: str, purpose: str) -> int:
        """Reserve the port somebody asked for. ResourceError naming it when it cannot be had."""
        if not 0 < port < 65536:
            raise ResourceError(f"{port} is not a TCP port.", remedy="Give --port a number from 1 to 65535.")
        if port in self._held:
            raise ResourceError(f"Port {port} is wanted twice ({purpose}).", remedy="Give another --port.")
        try:
            self._held[port] = _bind(host, port)
        except OSError as error:
            raise ResourceError(
                f"Port {port} on {host} for the {purpose} cannot be used: {_reason(error)}.",
                remedy="Give another --port, or leave it out to get a free one.",
            ) from error
        return port

    def pick(self, host: str = "127.0.0.1") -> int:
        """Reserve any free port. ResourceError when none is found after a few hundred attempts."""
        highest = max(_LOWEST + 1000, _ephemeral_start())
        for _ in range(_ATTEMPTS):
            port = random.randrange(_LOWEST, highest)
            if port in self._held:
                continue
            try:
                self._held[port] = _bind(host, port)
            except OSError:
                continue
            return port
        raise ResourceError(
            f"No free port between {_LOWEST} and {highest} on {host} after {_ATTEMPTS} attempts.",
            remedy="End some of the servers that hold them.",
        )

    def release(self, *ports: int | None) -> None:
        """Let go of ports whose owner starts now. Unknown ones and None are ignored."""
        for port in ports:
            if port is not None and (held := self._held.pop(port, None)) is not None:
                held.close()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind this port now."""
    try:
        _bind(host, port).close()
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do: closed connections that linger in TIME_WAIT do not make a port taken.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        # With SO_REUSEADDR two sockets may be bound where none listens; a short listen finds the rival.
        bound.listen(1)
    except OSError:
        bound.close()
        raise
    return bound


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "it is taken"
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
