"""vLLM's cache configuration in the words of the plan: specs to kinds, tensors to regions, config to fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.errors import ConfigError
from connector.plan.geometry import Cache, Cut, Geometry, Group, Page, Region, Share, cache_of_tensor
from connector.plan.kinds import ChunkedLocal, Full, Kind, Mla, SlidingWindow, State

KINDS: dict[type[KVCacheSpec], Callable[[Any], Kind]] = {
    FullAttentionSpec: lambda _: Full(),
    SlidingWindowSpec: lambda spec: SlidingWindow(spec.sliding_window),
    ChunkedLocalAttentionSpec: lambda spec: ChunkedLocal(spec.attention_chunk_size),
    MambaSpec: lambda _: State(),
    MLAAttentionSpec: lambda _: Mla(),
}
SUPPORTED = "full, sliding-window, chunked local and latent (MLA) attention, and recurrent states"

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def kind_of(spec: KVCacheSpec, layer: str) -> Kind:
    """The kind of one cache spec. A kind that is not implemented is refused, naming the layer; it is never skipped."""
    make = KINDS.get(type(spec))  # exact types: subclasses (sinks, compressed latents, …) have pages of another meaning
    if make is not None and getattr(spec, "tokens_per_state", 1) in (1, -1):
        return make(spec)
    raise ConfigError(
        f"Layer {layer} has a {type(spec).__name__} cache, which this connector cannot move.",
        remedy=f"It moves {SUPPORTED}. Serve this model without disaggregation, or with another connector.",
    )


def check_groups(cache: KVCacheConfig, *, speculates: bool = False) -> None:
    """Refuse a model at start when one of its groups cannot be moved. speculates: the engine drafts tokens."""
    for group in cache.kv_cache_groups:
        if _group_kind(group) == State() and speculates:
            raise ConfigError(
                f"Layer {group.layer_names[0]} keeps a state, and with speculation it keeps drafts of it.",
                remedy="Leave --speculative-config out.",
            )
    if not cache.kv_cache_groups:
        raise ConfigError("This model has no KV cache, there is nothing to hand over.")


def geometry_from(
    cache: KVCacheConfig, tensors: Mapping[str, torch.Tensor], *, heads: int = 1, rank: int = 0, ranks: int = 1
) -> Geometry:
    """Regions and groups of one rank, from the tensors that vLLM registers. heads: KV heads of the whole model.

    Layers whose blocks start at the same addresses share a region: layers of several groups, whose pages may differ in
    size, and layers that reuse the cache of an earlier layer, which moves once.
    """
    known: dict[tuple[int, int, int], int] = {}
    regions: list[Region] = []
    groups = []
    for group in cache.kv_cache_groups:
        kind = _group_kind(group)
        pages: list[Page] = []
        cuts: set[int] = set()
        for layer in group.layer_names:
            if layer not in tensors:
                raise ConfigError(f"vLLM registered no KV cache for layer {layer}.")
            found = _cache(tensors[layer], cache.num_blocks, layer)
            cuts.add(found.kernel_blocks)
            for region in found.regions:
                key = (region.base, region.stride, region.device)
                number = known.setdefault(key, len(regions))
                if number == len(regions):
                    regions.append(region)
                elif region.block_bytes > regions[number].block_bytes:
                    regions[number] = region
                page = Page(number, 0, region.block_bytes)
                if page not in pages:
                    pages.append(page)
        if len(cuts) != 1:
            raise ConfigError(f"Layers of one group are cut into {sorted(cuts)} kernel blocks: {group.layer_names}.")
        groups.append(
            Group(
                kind=kind,
                block_size=_first_spec(group).block_size,
                layers=tuple(group.layer_names),
                pages=tuple(pages),
                share=_share(group, heads, rank, ranks),
                cut=_cut(group, tensors),
                kernel_blocks=cuts.pop(),
            )
        )
    geometry = Geometry(tuple(regions), tuple(groups))
    for made in geometry.groups:
        _check_overlap(geometry, made)
    return geometry


def layout_of(cache: KVCacheConfig, tensors: Mapping[str, torch.Tensor]) -> str:
    """The order of dimensions inside the pages and the shapes inside states, so that peers whose bytes mean something
    else are refused."""
    inner = set()
    for group in cache.kv_cache_groups:
        spec = _first_spec(group)
        if isinstance(spec, MambaSpec):
            parts = (
                f"{'x'.join(map(str, s))}:{str(d).removeprefix('torch.')}"
                for s, d in zip(spec.shapes, spec.dtypes, strict=True)
            )
            inner.add(f"{spec.mamba_type.name.lower()}({' '.join(parts)} {get_conv_state_layout()})")
            continue
        for layer in group.layer_names:
            strides = tensors[layer].stride()
            order = sorted(range(1, len(strides)), key=strides.__getitem__, reverse=True)
            inner.add(",".join(map(str, order)))
    return f"{cache.kv_cache_layout or 'default'} {' '.join(sorted(inner))}"


def comparable_fields(
    config: VllmConfig, layout: str, protocol: int, vllm_version: str, *, verify_pages: bool
) -> dict[str, str]:
    """What must be equal on both sides, by name, beside the groups themselves."""
    model = config.model_config
    draft = config.speculative_config
    has_draft_model = draft is not None and draft.method not in (None, "ngram", "ngram_gpu", "suffix")
    return {
        "model": f"{'/'.join(model.architectures)} {_config_hash(model.hf_config)}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "layout": layout,
        "hma": "off" if config.scheduler_config.disable_hybrid_kv_cache_manager else "on",
        "draft_model": str(draft.method) if draft is not None and has_draft_model else "none",
        "connector": f"hma protocol {protocol}",
        "vllm": vllm_version,
        "verify_pages": "on" if verify_pages else "off",
    }


def refuse_unsupported(config: VllmConfig, *, verify_pages: bool = False) -> None:
    """Name what this version cannot do before anything is registered."""
    parallel = config.parallel_config
    if verify_pages and parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"verify_pages with --tensor-parallel-size {parallel.tensor_parallel_size} is not supported.",
            remedy="Leave verify_pages off.",
        )
    for name, value in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if value > 1:
            raise ConfigError(f"HmaNixlConnector does not support {name} {value} yet.", remedy=f"Use {name} 1.")
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.enable_permute_local_kv:
        raise ConfigError("HmaNixlConnector does not permute KV.", remedy="Leave enable_permute_local_kv unset.")


def memory_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """`DRAM` or `VRAM`, in NIXL's words, for the memory that all tensors lie in."""
    kinds = {tensor.device.type for tensor in tensors.values()}
    if len(kinds) != 1:
        raise ConfigError(f"KV caches on several kinds of device: {', '.join(sorted(kinds))}.")
    return "DRAM" if kinds == {"cpu"} else "VRAM"


def _first_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec of a group's first layer; layers of one type with pages of several sizes have one each."""
    spec = group.kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _group_kind(group: KVCacheGroupSpec) -> Kind:
    layer = group.layer_names[0] if group.layer_names else "(none)"
    if not group.enable_kv_transfer or group.host_resident:
        raise ConfigError(f"The cache of layer {layer} is marked as not transferable by vLLM.")
    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return kind_of(spec, layer)
    kinds = {kind_of(one, name) for name, one in spec.kv_cache_specs.items()}
    if len(kinds) != 1:
        raise ConfigError(f"Layers of one group are of several kinds: {group.layer_names}.")
    return kinds.pop()


def _share(group: KVCacheGroupSpec, heads: int, rank: int, ranks: int) -> Share:
    """What this rank holds of a group: some of its heads, one of them where there are fewer than ranks, a part of a
    state, or all of what every rank holds."""
    spec = _first_spec(group)
    if isinstance(spec, MambaSpec):
        return Share() if spec.tp_replicated else Share(rank, 1, ranks)
    assert isinstance(spec, AttentionSpec), "check_groups has refused all other kinds"
    held = spec.num_kv_heads
    if isinstance(spec, MLAAttentionSpec):
        return Share()
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        if ranks > 1:
            raise ConfigError(f"Layers with pages of several sizes in one group, under {ranks} ranks: not supported.")
        return Share()
    total = held * ranks if held > 1 or heads >= ranks else heads
    return Share(rank * total // ranks, held, total)


def _cut(group: KVCacheGroupSpec, tensors: Mapping[str, torch.Tensor]) -> Cut:
    """What blocks of a group may be cut into.

    vLLM's tensors are (blocks, heads, tokens, bytes of a token), and their strides say how these lie in memory. Its CPU
    backend keeps each head of a block in an order of its own (`CPUAttentionBackendImpl`), and quantised caches keep
    scales between tokens.
    """
    spec = _first_spec(group)
    if isinstance(spec, MambaSpec):
        return "whole"
    shapes = [(tensors[layer].shape, tensors[layer].stride()) for layer in group.layer_names]
    if any(len(shape) != 4 or (shape[1] > 1 and steps[1] < steps[2] * shape[2]) for shape, steps in shapes):
        return "whole"
    on_host = any(tensors[layer].device.type == "cpu" for layer in group.layer_names)
    quantised = getattr(spec, "kv_quant_mode", KVQuantMode.NONE) != KVQuantMode.NONE
    return "heads" if on_host or quantised else "tokens"


def _cache(tensor: torch.Tensor, num_blocks: int, layer: str) -> Cache:
    try:
        return cache_of_tensor(
            base=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            itemsize=tensor.element_size(),
            num_blocks=num_blocks,
            device=max(tensor.get_device(), 0),
        )
    except ConfigError as error:
        raise ConfigError(f"Layer {layer}: {error.message}", remedy=error.remedy) from error


def _check_overlap(geometry: Geometry, group: Group) -> None:
    """Pages of one group may interleave (one stride, pages apart), but no two of them may share a byte. Pages of
    different groups may: no block is in two groups at once."""
    strips = [geometry.strip(page) for page in group.pages]
    for one, other in combinations(strips, 2):
        ends = [strip.base + strip.stride * (strip.count - 1) + strip.num_bytes for strip in (one, other)]
        apart = ends[0] <= other.base or ends[1] <= one.base
        shift = (other.base - one.base) % one.stride
        interleaved = one.stride == other.stride and one.num_bytes <= shift <= one.stride - other.num_bytes
        if one.device == other.device and not apart and not interleaved:
            raise ConfigError(f"Two KV caches of one group overlap in memory: {one} and {other}.")


def _config_hash(hf_config: object) -> str:
    """A short digest of the model's config, without what differs between copies of one model."""
    values = hf_config.to_dict()  # type: ignore[attr-defined]
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
