"""`HmaNixlConnector`: vLLM's connector interface, in front of the scheduler side or the worker side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connector.engine.gate import check_interface
from connector.engine.metadata import RankMetadata, StepMetadata, WorkerMetadata
from connector.engine.metrics import HmaPromMetrics, HmaStats
from connector.engine.scheduler import SchedulerSide
from connector.engine.settings import settings_from
from connector.engine.specs import check_groups, refuse_unsupported
from connector.engine.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

check_interface(KVConnectorBase_V1, vllm.__version__)


class HmaNixlConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves exactly the live KV of a hybrid model from a prefill engine to a decode engine.

    vLLM makes one object in the scheduler's process and one in each worker. Both sides check the model and the
    configuration when they are made, so that what cannot be served ends the start and not a request.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_from(self._kv_transfer_config.kv_connector_extra_config)
        refuse_unsupported(vllm_config, verify_pages=settings.verify_pages)
        check_groups(kv_cache_config, speculates=vllm_config.speculative_config is not None)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, settings)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings)

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler hook was called in a worker"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a worker hook was called in the scheduler"
        return self._worker

    # Both ----------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> HmaStats | None:
        side = self._scheduler or self._working
        return side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HmaStats:
        return HmaStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> HmaPromMetrics:
        return HmaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Layer by layer, in each block the heads outermost: so a block is contiguous, and can be cut into heads."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    # Scheduler -----------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        ranks = {rank: data for rank, data in metadata.items() if isinstance(data, RankMetadata)}
        self._scheduling.start(ranks)

    def on_new_request(self, request: Request) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduling.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduling.step_metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduling.on_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, block_ids)

    # Worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._working.register(kv_caches)

    def get_handshake_metadata(self) -> RankMetadata | None:
        return self._working.rank

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        self._working.step(meta)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._working.results()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self._working.take_metadata()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before vLLM schedules their request: there is nothing to wait for in a layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Peers read finished blocks where they lie: there is nothing to save in a layer."""

    def wait_for_save(self) -> None:
        """As `save_kv_layer`."""
