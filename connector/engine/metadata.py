"""What the two halves of the connector tell each other through vLLM, and what the worker tells before it serves."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from connector.plan.geometry import Geometry
from connector.transport.loader import Load, PeerMemory


@dataclass(frozen=True)
class RankMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: how a peer reaches this rank's memory, and how it is laid out."""

    transport: str
    memory: str
    connection: bytes
    layout: str
    geometry: Geometry


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to worker, each step.

    peers: memory of peers that loads of this step need, by epoch. loads: to start now. leases: `valid_until` of loads
    under way, by request. cancelled: loads whose request has left. refused: requests that fail, because their claim was
    refused and the policy is `fail`. freed: P's requests whose blocks go back. dropped: epochs of peers that are gone.
    published: P's requests whose offered pages need digests, with the offered block ids by group.
    """

    peers: dict[str, PeerMemory] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    leases: dict[str, float] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    published: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler, after a step. digests: of offered pages, by request and group. failed: why loads failed on
    this rank, by request."""

    digests: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata), "all ranks run this connector"
        return WorkerMetadata(self.digests | other.digests, other.failed | self.failed)
