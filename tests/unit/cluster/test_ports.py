"""Ports are free, distinct, held until released, and a taken one is named."""

from __future__ import annotations

import socket

import pytest

from connector.errors import ResourceError
from hma_cli.cluster.ports import Ports, is_free


def listener(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen()
    return sock


def test_picked_ports_are_distinct_and_below_the_ephemeral_range() -> None:
    with Ports() as ports:
        picked = [ports.pick() for _ in range(40)]
    assert len(set(picked)) == 40
    with open("/proc/sys/net/ipv4/ip_local_port_range") as stream:
        assert max(picked) < int(stream.read().split()[0])


def test_a_held_port_is_taken_for_others_until_it_is_released() -> None:
    with Ports() as ports:
        port = ports.pick()
        assert not is_free(port)
        ports.release(port, None)
        with listener(port):
            assert not is_free(port)
        assert is_free(port)


def test_everything_is_released_at_the_end() -> None:
    with Ports() as ports:
        picked = [ports.pick() for _ in range(3)]
    assert all(is_free(port) for port in picked)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_named(host: str) -> None:
    with listener(host=host) as sock, Ports() as ports:
        port = sock.getsockname()[1]
        with pytest.raises(ResourceError, match=f"Port {port} on 127.0.0.1 for the router cannot be used: it is taken"):
            ports.take(port, "127.0.0.1", "router")


@pytest.mark.parametrize("port", [0, -1, 70000])
def test_what_is_no_port_is_refused(port: int) -> None:
    with Ports() as ports, pytest.raises(ResourceError, match="not a TCP port"):
        ports.take(port, "127.0.0.1", "router")


def test_the_same_port_twice_is_refused() -> None:
    with Ports() as ports:
        port = ports.pick()
        with pytest.raises(ResourceError, match="wanted twice"):
            ports.take(port, "127.0.0.1", "router")


def test_an_address_of_another_machine_is_refused() -> None:
    with Ports() as ports, pytest.raises(ResourceError, match=r"192\.0\.2\.77"):
        ports.take(23456, "192.0.2.77", "router")
