"""Peers of a decode engine: one table, one object each, one way in and one way out."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from connector.errors import ConfigError, HmaError
from connector.plan.geometry import Geometry
from connector.plan.join import join
from connector.transport.loader import PeerMemory, RankMemory
from connector.wire.compare import check
from connector.wire.described import geometry_of
from connector.wire.messages import EngineDescription

Endpoint = tuple[str, int]
LOOPBACK = ("127.0.0.0/8", "::1/128")


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill engine that answered, and whether it fits.

    geometries: the memory of its ranks, in order, when it fits; else none, and `refusal` says why not. A peer is made
    whole or not at all.
    """

    endpoint: Endpoint
    engine: EngineDescription
    geometries: tuple[Geometry, ...]
    refusal: str = ""

    @property
    def memory(self) -> PeerMemory:
        """What a worker needs to read from it."""
        ranks = zip(self.engine.ranks, self.geometries, strict=True)
        return PeerMemory(tuple(RankMemory(connection=rank.connection, geometry=known) for rank, known in ranks))

    @property
    def epoch(self) -> str:
        return self.engine.epoch

    @classmethod
    def examine(cls, endpoint: Endpoint, ours: EngineDescription, theirs: EngineDescription) -> Peer:
        """Validate a description as a whole. Nothing has been registered when this refuses."""
        try:
            check(ours, theirs)
            geometries = tuple(geometry_of(theirs, rank) for rank in range(len(theirs.ranks)))
            for rank in range(len(ours.ranks)):  # what cannot be joined is refused here, not in a load
                join(geometry_of(ours, rank), geometries, rank=rank, ranks=len(ours.ranks))
            return cls(endpoint, theirs, geometries)
        except HmaError as error:
            return cls(endpoint, theirs, (), str(error))


class AllowedPeers:
    """Hosts that D may be sent to, and that P answers: addresses, networks or host names. Loopback unless told
    otherwise."""

    def __init__(self, allowed: Iterable[str] = LOOPBACK) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in allowed:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                if "/" in entry or not entry:
                    raise ConfigError(f"Not a host or network: {entry!r}.", remedy="Mend allowed_peers.") from None
                self._names.add(entry)

    def resolve(self, host: str) -> str | None:
        """The address to connect to, or None when the host is not allowed."""
        if host in self._names:
            return host
        address = _address(host)
        if address is not None and any(address in network for network in self._networks):
            return str(address)
        return None

    def permits(self, source: str) -> bool:
        """Whether a connection from this address is answered. Host names are looked up when they are needed."""
        address = _address(source)
        if address is None:
            return False
        mapped = getattr(address, "ipv4_mapped", None) or address
        if any(mapped in network for network in self._networks):
            return True
        return any(str(mapped) in _looked_up(name) for name in self._names)


@lru_cache(maxsize=256)
def _looked_up(name: str) -> frozenset[str]:
    try:
        return frozenset(str(entry[4][0]) for entry in socket.getaddrinfo(name, None))
    except OSError:
        return frozenset()


@lru_cache(maxsize=256)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if host == "localhost":
        return ipaddress.ip_address("127.0.0.1")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def own_host(configured: str) -> str:
    """The address that P writes into its handles: the one it listens on, or this machine's when it listens on all."""
    if configured not in ("0.0.0.0", "::", "*"):
        return configured
    return socket.gethostbyname(socket.gethostname())
