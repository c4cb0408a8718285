"""The worker side: registers memory, runs loads, reports each of them once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connector.engine.metadata import RankMetadata, StepMetadata, WorkerMetadata
from connector.engine.metrics import HmaStats
from connector.engine.settings import Settings
from connector.engine.specs import geometry_from, layout_of, memory_of
from connector.errors import ConfigError
from connector.transport.base import Transport
from connector.transport.digests import published
from connector.transport.faulty import Faults, FaultyTransport
from connector.transport.loader import Loader
from connector.transport.nixl import NixlTransport
from connector.transport.parts import Recovery

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = logging.getLogger("vllm.hma")


class WorkerSide:
    """One rank's half. vLLM calls it from the worker's thread only."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> None:
        self._cache, self._settings = cache, settings
        self._heads = config.model_config.get_total_num_kv_heads()
        self._transport: Transport | None = None
        self._loader: Loader | None = None
        self._rank: RankMetadata | None = None
        self._freed: set[str] = set()
        self._refused: set[str] = set()
        self._stats = HmaStats()
        self._told = WorkerMetadata()
        ask_for_amx()

    @property
    def rank(self) -> RankMetadata | None:
        """This rank's memory for peers; None until the caches are registered."""
        return self._rank

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Describe the caches, check them as a whole, then register them with the transport."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        geometry = geometry_from(self._cache, tensors, heads=self._heads, rank=rank, ranks=ranks)
        memory = memory_of(tensors)
        layout = layout_of(self._cache, tensors)
        if self._settings.verify_pages and memory != "DRAM":
            raise ConfigError(f"Pages in {memory} cannot be verified.", remedy="Leave verify_pages off.")
        transport = self._with_faults(NixlTransport(memory, self._settings.backends))
        connection = transport.register(geometry.regions)
        self._transport = transport
        recovery = Recovery(max_attempts=self._settings.max_attempts, read_timeout=self._settings.read_timeout)
        self._loader = Loader(
            transport, geometry, max_runs=self._settings.part_runs, rank=rank, ranks=ranks, recovery=recovery
        )
        self._rank = RankMetadata(
            transport=transport.kind, memory=memory, connection=connection, layout=layout, geometry=geometry
        )

    def step(self, meta: StepMetadata) -> None:
        """Carry out what the scheduler side decided in this step."""
        assert self._loader is not None, "vLLM steps before it has registered the KV caches"
        for epoch in meta.dropped:
            self._loader.forget(epoch)
        for epoch, memory in meta.peers.items():
            self._loader.connect(epoch, memory)
        for load in meta.loads:
            self._loader.start(load)
        for request_id, valid_until in meta.leases.items():
            self._loader.extend(request_id, valid_until)
        for request_id in meta.cancelled:
            self._loader.cancel(request_id)
        for request_id, blocks in meta.published.items():
            assert self._rank is not None, "the caches are registered"
            self._told.digests[request_id] = published(self._rank.geometry, blocks)
        self._freed.update(meta.freed)
        self._refused.update(meta.refused)

    def results(self) -> KVConnectorTransferResults:
        """What ended since the last step. A failed load is reported as received and as failed."""
        results = KVConnectorTransferResults(
            finished_sending=self._freed, finished_recving=set(self._refused), failed_recving=self._refused
        )
        self._freed, self._refused = set(), set()
        for outcome in self._loader.poll() if self._loader is not None else ():
            self._stats.record(outcome)
            results.finished_recving.add(outcome.request_id)
            if not outcome.ok:
                self._told.failed[outcome.request_id] = outcome.reason
                results.failed_recving.add(outcome.request_id)
        return results

    def take_metadata(self) -> WorkerMetadata | None:
        """What the scheduler side does not know yet, None when there is nothing."""
        if not self._told.digests and not self._told.failed:
            return None
        told, self._told = self._told, WorkerMetadata()
        return told

    def take_stats(self) -> HmaStats | None:
        """Counts since the last call, None when there are none."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, HmaStats()
        return stats

    def _with_faults(self, transport: Transport) -> Transport:
        """The transport with the faults that the settings ask for, if they do."""
        if not self._settings.faults:
            return transport
        logger.warning("Faults are injected into this engine's reads: %s", self._settings.faults)
        faults = Faults.parse(self._settings.faults)
        return FaultyTransport(
            transport, faults, on_fault=lambda name: self._stats.count_labelled("faults_injected", name)
        )

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        if self._transport is not None:
            self._transport.close()
        self._loader = self._transport = None


def ask_for_amx() -> None:
    """Ask the kernel for AMX before the first attention call, where the CPU has it.

    An engine that only decodes can reach vLLM's AMX attention before anything has asked, and dies with SIGILL.
    """
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if is_supported is not None and is_supported():
        torch.cpu._init_amx()
