"""Real NIXL between two processes: the right bytes, and as many descriptors as the plan has runs."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from connector.errors import TransportError
from connector.plan.build import run_starts
from connector.plan.geometry import Region, Strip
from connector.transport.base import Progress
from connector.transport.nixl import NixlTransport

PAGE = 4096


def arena(num_blocks: int) -> tuple[np.ndarray, Region]:
    memory = np.zeros((num_blocks, PAGE), np.uint8)
    return memory, Region(base=memory.ctypes.data, stride=PAGE, block_bytes=PAGE, num_blocks=num_blocks)


def strip(region: Region) -> Strip:
    """Every block of a region."""
    return Strip(base=region.base, num_bytes=PAGE, stride=PAGE, count=region.num_blocks, device=0)


def serve(pipe: Connection) -> None:
    """The other process: register pages whose bytes are their numbers, until told to end."""
    memory, region = arena(64)
    memory[:] = np.arange(64)[:, None]
    transport = NixlTransport("DRAM")
    pipe.send((transport.register([region]), region))
    pipe.recv()
    transport.close()


@pytest.fixture(scope="module")
def reader() -> Iterator[Any]:
    near, far = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(far,))
    process.start()
    assert near.poll(60)
    data, region = near.recv()
    memory, ours = arena(96)
    transport = NixlTransport("DRAM")
    transport.register([ours])
    connection = transport.connect(data, [strip(ours)], [strip(region)])
    yield memory, transport, connection, strip(ours)
    near.send("end")
    connection.close()
    transport.close()
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ([10, 11, 12, 13], [1, 2, 3, 4]),
        ([13, 12, 11, 10], [1, 2, 3, 4]),
        ([20, 40, 21, 60], [5, 9, 30, 31]),
        ([50, 51, 70, 71, 72], [5, 6, 7, 8, 9]),
    ],
    ids=["ascending", "descending", "scattered", "two runs"],
)
def test_pages_arrive_and_merge_as_planned(reader: Any, local: list[int], remote: list[int]) -> None:
    memory, _, connection, _ = reader
    memory[:] = 200
    read = connection.read(np.array(local, np.int32), np.array(remote, np.int32))
    deadline = time.monotonic() + 20
    while read.poll() is Progress.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert read.poll() is Progress.DONE
    figures = read.telemetry()
    assert read.close()
    expected = np.full_like(memory, 200)
    expected[local] = np.array(remote, np.uint8)[:, None]
    assert (memory == expected).all()
    assert figures.num_bytes == len(local) * PAGE
    assert figures.descriptors == int(run_starts(np.array(local), np.array(remote)).sum())


def test_what_cannot_be_read_is_an_error_not_a_crash(reader: Any) -> None:
    _, transport, connection, ours = reader
    with pytest.raises(TransportError, match="cannot prepare a read"):
        connection.read(np.array([1], np.int32), np.array([64], np.int32))
    with pytest.raises(TransportError, match="does not accept"):
        transport.connect(b"not an agent", [ours], [ours])


def test_a_closed_connection_refuses_reads() -> None:
    """As after a peer has died and could not be connected anew: NIXL itself would read through a freed handle."""
    (_, theirs), (_, ours) = arena(8), arena(8)
    peer, transport = NixlTransport("DRAM"), NixlTransport("DRAM")
    transport.register([ours])
    closed = transport.connect(peer.register([theirs]), [strip(ours)], [strip(theirs)])
    closed.close()
    closed.close()
    with pytest.raises(TransportError, match="closed"):
        closed.read(np.array([1], np.int32), np.array([1], np.int32))
    transport.close()
    peer.close()
