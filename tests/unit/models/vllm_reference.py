"""vLLM's own functions, asked about hand-made layers: the other side of `test_grouping_against_vllm`.

Only public shapes go in: each layer becomes the spec that vLLM's layer of that kind would return, block sizes are
resolved by vLLM's platform code with small stand-ins for config, model and backend. No engine starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import select_common_block_size

from connector.plan.kinds import ChunkedLocal, Full, SlidingWindow
from hma_cli.models.caches import Attention, Latent, Layer, Recurrent
from hma_cli.models.capacity import Load
from hma_cli.models.grouping import EngineOptions

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
LAYOUTS = {"layer_compact": KVCacheLayout.LBHNC, "block_outermost": KVCacheLayout.BLHNC}
REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError, StopIteration)


class Backend:
    """As much of an attention backend as block sizes ask for."""

    sizes: tuple[Any, ...]

    @classmethod
    def get_supported_kernel_block_sizes(cls, spec: KVCacheSpec | None = None) -> list[Any]:  # noqa: ARG003
        return list(cls.sizes)

    @classmethod
    def customize_spec(cls, spec: KVCacheSpec) -> KVCacheSpec:
        return spec

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__


class Cuda(Backend):
    sizes = (MultipleOf(16),)  # FLASH_ATTN, FLASH_ATTN_MLA


class Cpu(Backend):
    sizes = (MultipleOf(32),)  # CPU_ATTN, AMX_MLA


class CpuReference(Backend):
    sizes = (16,)  # CPU_MLA


@dataclass(frozen=True)
class Answer:
    """What vLLM says, in the words of `hma_cli.models.grouping`."""

    groups: list[tuple[str, int, list[tuple[str, int]]]]  # kind, block size, (layer, page bytes)
    bytes_per_block: int
    scheduler_block_size: int
    blocks_per_request: int
    concurrency: float


def answer(layers: Sequence[Layer], options: EngineOptions, load: Load, num_blocks: int) -> Answer:
    """Raises one of REFUSALS where vLLM does."""
    config = _config(layers, options, load)
    backends = {layer.name: backend for layer in layers if (backend := _backend(layer, layers, options)) is not None}
    if options.device == "cuda" and backends and config.cache_config.block_size % 16:
        # v1/attention/backend.py: validate_configuration
        raise ValueError("no backend is chosen for this block size")
    _align(config, layers, list(dict.fromkeys(backends.values())))
    specs = {layer.name: _spec(layer, config, backends.get(layer.name)) for layer in layers}
    layout = config.cache_config.get_resolved_kv_cache_layout()
    with _quiet():
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
    if sorted(name for group in groups for name in group.layer_names) != sorted(specs):
        raise AssertionError("vLLM lost layers")
    kv_cache_utils.validate_kv_cache_layout(layout, groups)
    for group in groups:
        if readers := [backends[name] for name in group.layer_names if name in backends]:
            select_common_block_size(group.kv_cache_spec.block_size, readers)  # type: ignore[arg-type]
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in groups)  # v1/engine/core.py
    bytes_per_block = kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)
    return Answer(
        groups=[
            (
                str(get_kv_cache_spec_kind(group.kv_cache_spec).value),
                group.kv_cache_spec.block_size,
                [(name, kv_cache_utils._get_per_layer_spec(group, name).page_size_bytes) for name in group.layer_names],
            )
            for group in groups
        ],
        bytes_per_block=bytes_per_block,
        scheduler_block_size=kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)[0],
        blocks_per_request=kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups) // bytes_per_block,
        concurrency=kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cache),
    )


def _config(layers: Sequence[Layer], options: EngineOptions, load: Load) -> Any:
    states = any(isinstance(layer.cache, Recurrent) for layer in layers)
    readers = [layer for layer in layers if not isinstance(layer.cache, Recurrent)]
    prefix_caching = bool(readers) if options.prefix_caching is None else options.prefix_caching
    layout = LAYOUTS[options.layout or "layer_compact"]
    model = next((layer for layer in readers if layer.kind.window is None and layer.kind.chunk is None), None)
    cache: Any = model.cache if model else readers[0].cache if readers else None
    latent = isinstance(cache, Latent)
    block_size = options.block_size
    if block_size is None:
        block_size = 16 if options.device == "cuda" or not readers else 128  # config/cache.py, platforms/cpu.py
        if options.device == "cpu" and latent and not states:
            block_size = 16
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=block_size,
            cache_dtype="auto",
            enable_prefix_caching=prefix_caching,
            mamba_cache_mode="align" if prefix_caching else "none",
            mamba_block_size=block_size if prefix_caching else options.max_model_len,
            mamba_page_size_padded=None,
            skip_page_size_padded=None,
            prefix_match_unit=None,
            num_gpu_blocks_override=None,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
        model_config=SimpleNamespace(
            dtype=DTYPES[2] if cache is None or latent else DTYPES[cache.item_bytes],
            use_mla=latent,
            architecture="",
            max_model_len=load.request_tokens,
            get_num_kv_heads=lambda _: 1 if latent else cache.heads,
            get_head_size=lambda: cache.state_bytes // 2 if latent else cache.head_size,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not options.hma),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=load.in_flight_tokens,
    )


def _backend(layer: Layer, layers: Sequence[Layer], options: EngineOptions) -> type[Backend] | None:
    """None for states and for layers whose block no option changes."""
    match layer.cache:
        case Recurrent() | Latent(block_size=int()):
            return None
        case Latent() if options.device == "cpu":
            hybrid = any(isinstance(other.cache, Recurrent) for other in layers)
            return CpuReference if not hybrid and options.block_size in (None, 16) else Cpu
    return Cuda if options.device == "cuda" else Cpu


def _align(config: Any, layers: Sequence[Layer], backends: list[type[Backend]]) -> None:
    """vLLM's own alignment, for models with states and attention."""
    states = [layer.cache for layer in layers if isinstance(layer.cache, Recurrent)]
    if not states or len(states) == len(layers):
        return
    largest = max(states, key=lambda state: state.num_bytes)
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: largest.shapes,
        get_mamba_state_dtype_from_config=lambda _: tuple(DTYPES[size] for size in largest.item_bytes),
    )

    class Here(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, vllm_config: Any) -> Any:  # noqa: ARG003
            return backends

    with (
        patch("vllm.config.vllm.set_current_vllm_config", lambda _: nullcontext()),
        patch.object(ModelRegistry, "resolve_model_cls", lambda *_, **__: (model, "")),
    ):
        Here._align_hybrid_block_size(config, backends[0])  # type: ignore[arg-type]


def _spec(layer: Layer, config: Any, backend: type[Backend] | None) -> KVCacheSpec:
    cache_config = config.cache_config
    match layer.cache:
        case Recurrent(shapes=shapes, item_bytes=sizes, family=family):
            mamba2 = family == "mamba2"
            return MambaSpec(
                block_size=cache_config.mamba_block_size,
                shapes=shapes,
                dtypes=tuple(DTYPES[size] for size in sizes),
                page_size_padded=cache_config.mamba_page_size_padded,
                mamba_cache_mode=cache_config.mamba_cache_mode,
                num_prefill_checkpoint_blocks=int(mamba2),  # layers/mamba/mamba_mixer2.py: get_kv_cache_spec
                prefill_checkpoint_alignment=1 if mamba2 else None,
            )
        case Latent() as latent:
            common: dict[str, Any] = {
                "block_size": latent.block_size or cache_config.block_size,
                "num_kv_heads": 1,
                "head_size": latent.state_bytes,
                "dtype": torch.uint8,
                "tokens_per_state": latent.tokens_per_state,
                "alignment": latent.page_multiple if latent.page_multiple > 1 else None,
            }
            if latent.kind.window is None:
                return MLAAttentionSpec(**common)
            return SlidingWindowMLASpec(sliding_window=latent.kind.window, **common)
        case Attention() as attention:
            return _attention_spec(attention, cache_config.block_size, backend)
    raise TypeError(layer)


def _attention_spec(cache: Attention, block_size: int, backend: type[Backend] | None) -> KVCacheSpec:
    common: dict[str, Any] = {
        "num_kv_heads": cache.heads,
        "head_size": cache.head_size,
        "head_size_v": cache.head_size_v,
        "dtype": DTYPES[cache.item_bytes],
    }
    match cache.kind:
        case SlidingWindow(window):
            # model_executor/layers/attention/attention.py: Attention.get_kv_cache_spec
            own = _largest_kernel_block_within(
                backend,  # type: ignore[arg-type]
                cache.token_bytes,
                cache.token_bytes * block_size,
                block_size,
            )
            return SlidingWindowSpec(block_size=own, sliding_window=window, **common)
        case ChunkedLocal(chunk):
            return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=chunk, **common)
        case Full():
            return FullAttentionSpec(block_size=block_size, **common)


@contextmanager
def _quiet() -> Iterator[None]:
    with patch.object(kv_cache_utils, "logger"):
        yield
