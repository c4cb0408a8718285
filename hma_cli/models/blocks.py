"""Block sizes before grouping: what the engine is asked for, what its kernels take, what a state needs.

Sources in vLLM 0.32: `config/cache.py` (the default of 16), `platforms/cpu.py` (128, and the exceptions for latents),
`platforms/interface.py` (`_preferred_block_size_for_backends`, `_align_hybrid_block_size`), `model_executor/models/
config.py` (`MambaModelConfig`: prefix caching decides how states are kept).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

from connector.errors import ConfigError
from hma_cli.models.caches import Attention, Latent, Layer, Recurrent
from hma_cli.models.pages import Paged, paged

Device = Literal["cuda", "cpu"]
MemoryLayout = Literal["layer_compact", "block_outermost"]

DEFAULT_BLOCK = 16
"""Tokens, where no backend wishes otherwise."""

V4_BLOCK = 256
"""Tokens: the only size that the indexer of DeepSeek-V4 takes, for its layers bring their own."""

SPARSE_PART = "indexer"
"""The part of a layer that picks the latents to attend to."""

LATENT_HYBRID_MULTIPLE = 128
"""Tokens: the block of a model with latents and states is a multiple of this (kernels want it on some GPUs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine is started, as far as it decides groups. None: what vLLM 0.32 does unless told.

    block_size: tokens; the default is 16, on CPU 128 (16 for latents), 64 for sparse latents (DeepSeek-V3.2). Layers of
    DeepSeek-V4 bring their own. layout: layer compact, for DeepSeek-V4 block outermost. prefix_caching: on, but off for
    models of states only. max_model_len: in tokens; needed for states where prefix caching is off.
    """

    block_size: int | None = None
    device: Device = "cuda"
    layout: MemoryLayout | None = None
    hma: bool = True
    prefix_caching: bool | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("block size", self.block_size), ("maximum model length", self.max_model_len)):
            if value is not None and value < 1:
                raise ConfigError(f"The {name} must be at least one token, not {value}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Kernels that read a layer's blocks, which are multiples of `multiple` tokens; larger ones are read in pieces."""

    name: str
    multiple: int
    default: int


FLASH_ATTN = Backend(name="FLASH_ATTN", multiple=16, default=16)
CPU_ATTN = Backend(name="CPU_ATTN", multiple=32, default=128)
FLASH_ATTN_MLA = Backend(name="FLASH_ATTN_MLA", multiple=16, default=16)
CPU_MLA = Backend(name="CPU_MLA", multiple=16, default=16)
SPARSE_MLA = Backend(name="sparse MLA", multiple=16, default=64)
AMX_MLA = Backend(name="AMX_MLA", multiple=32, default=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels read which layer on a device.

    wide_latents: whether latents on CPU lie in blocks other than 16 tokens. The reference kernel takes only 16; larger
    blocks, which the user or a state may ask for, need AMX.
    """

    device: Device
    wide_latents: bool

    def of(self, layer: Layer) -> Backend | None:
        """None where no kernel restricts the layer's block."""
        match layer.cache, self.device:
            case Recurrent(), _:
                return None
            case Attention(), device:
                return FLASH_ATTN if device == "cuda" else CPU_ATTN
            case Latent(block_size=int()), _:
                return None
            case Latent(), "cuda":
                return SPARSE_MLA if layer.part == SPARSE_PART else FLASH_ATTN_MLA
        return AMX_MLA if self.wide_latents else CPU_MLA

    def all(self, layers: Sequence[Layer]) -> list[Backend]:
        """Each once, in order of the layers."""
        return [backend for backend in dict.fromkeys(map(self.of, layers)) if backend is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Every layer with its block size and page, and what was decided on the way, in words."""

    pages: tuple[Paged, ...]
    kernels: Kernels
    layout: MemoryLayout
    prefix_caching: bool
    notes: tuple[str, ...]


def blocks_of(layers: Sequence[Layer], options: EngineOptions) -> Blocks:
    """Give every layer its block size and page. ConfigError for what vLLM refuses."""
    states = [layer for layer in layers if isinstance(layer.cache, Recurrent)]
    readers = [layer for layer in layers if not isinstance(layer.cache, Recurrent)]
    wide = bool(states) or options.block_size not in (None, CPU_MLA.multiple)
    kernels = Kernels(device=options.device, wide_latents=wide)
    _require_device(readers, kernels)
    layout = _layout(readers, kernels, options)
    prefix_caching = bool(readers) if options.prefix_caching is None else options.prefix_caching

    notes: list[str] = []
    backends = kernels.all(readers)
    block_size = _engine_block(backends, options, notes)
    padded_to = 0
    if states and readers:
        block_size, padded_to = _align(states, readers, backends, block_size, notes)
    state_block = _state_block(block_size, readers, options, prefix_caching) if states else 0
    if options.block_size is not None and not backends:
        notes += _unused(options.block_size, state_block, compressed=any(map(_compressed, readers)))
    return Blocks(
        pages=tuple(
            paged(layer, state_block, padded_to=padded_to)
            if isinstance(layer.cache, Recurrent)
            else paged(layer, _reader_block(layer, block_size, kernels))
            for layer in layers
        ),
        kernels=kernels,
        layout=layout,
        prefix_caching=prefix_caching,
        notes=tuple(notes),
    )


def _require_device(readers: Sequence[Layer], kernels: Kernels) -> None:
    sparse = any(layer.part == SPARSE_PART and not _compressed(layer) for layer in readers)
    if sparse and kernels.device == "cpu":
        raise ConfigError(
            "vLLM 0.32 does not run sparse latent attention on CPU.", remedy="Use --device cuda to plan this model."
        )


def _engine_block(backends: Sequence[Backend], options: EngineOptions, notes: list[str]) -> int:
    """The engine's block size in tokens, before states are looked at."""
    block_size = options.block_size
    if block_size is None:
        block_size = _default_block(backends)
    if options.device == "cuda":  # on CPU vLLM looks at the blocks of finished groups only
        for backend in backends:
            require_block(backend, block_size)
    if SPARSE_MLA in backends and block_size % SPARSE_MLA.default:
        notes.append(
            f"vLLM's sparse latent kernels do not start with {block_size}: multiples of {SPARSE_MLA.default} do"
        )
    if AMX_MLA in backends:
        notes.append("on a CPU without AMX vLLM reads latents in blocks of 16 only: this plan needs AMX")
    return block_size


def _unused(block_size: int, state_block: int, *, compressed: bool) -> list[str]:
    """What to say where no layer reads the engine's block size."""
    if block_size == (V4_BLOCK if compressed else state_block):
        return []
    only = f", and vLLM starts DeepSeek-V4 with {V4_BLOCK} only" if compressed else ""
    return [f"block size {block_size} is not used: every layer has one of its own{only}"]


def _default_block(backends: Sequence[Backend]) -> int:
    if not backends:
        return DEFAULT_BLOCK
    # On CPU a model with latents gets the size that its latents need, whatever else is in it.
    return CPU_MLA.default if CPU_MLA in backends else lcm(*(backend.default for backend in backends))


def require_block(backend: Backend, block_size: int, layer: Layer | None = None) -> None:
    """ConfigError where `backend` cannot read blocks of `block_size` tokens."""
    if block_size % backend.multiple:
        larger = -(-block_size // backend.multiple) * backend.multiple
        raise ConfigError(
            f"{f'{layer.name}: ' if layer else ''}{backend.name} does not take blocks of {block_size} tokens.",
            remedy=f"It takes multiples of {backend.multiple}: use --block-size {larger}.",
        )


def _align(
    states: Sequence[Layer], readers: Sequence[Layer], backends: Sequence[Backend], block_size: int, notes: list[str]
) -> tuple[int, int]:
    """The block size whose attention page holds a state, and the bytes that a state's page is padded to (0: none).

    Example (Qwen3-Next): a state of 1,097,728 bytes beside attention of 2,048 bytes a token. 536 tokens would do;
    the next multiple of 16 is 544, so a page has 1,114,112 bytes and a state's page is padded by 16,384.
    """
    state = max(layer.cache.num_bytes for layer in states if isinstance(layer.cache, Recurrent))
    full = [layer for layer in readers if layer.kind.window is None and layer.kind.chunk is None]
    token = _token_bytes((full or list(readers))[0])
    step = max(backends[0].multiple if backends else 1, block_size)
    if any(isinstance(layer.cache, Latent) for layer in readers):
        step = max(step, LATENT_HYBRID_MULTIPLE)
    multiple = lcm(*(backend.multiple for backend in backends))
    aligned = step * -(-state // (step * token))
    aligned = -(-aligned // multiple) * multiple
    if aligned > block_size:
        notes.append(f"block size {block_size} raised to {aligned}: one page must hold a state of {state:,} bytes")
        block_size = aligned
    page = block_size * token
    if page == state:
        return block_size, 0
    notes.append(f"a state of {state:,} bytes is padded to a page of {page:,} bytes")
    return block_size, page


def _token_bytes(layer: Layer) -> int:
    match layer.cache:
        case Attention(token_bytes=num_bytes) | Latent(token_bytes=num_bytes):
            return num_bytes
    raise TypeError(f"{layer.name} keeps nothing by token")


def _state_block(block_size: int, readers: Sequence[Layer], options: EngineOptions, prefix_caching: bool) -> int:
    """Tokens that one state block stands for: the whole sequence where prefix caching is off."""
    if prefix_caching:
        # Without attention there is no kernel to please: the engine's default stays what it is on every platform.
        return block_size if readers else options.block_size or DEFAULT_BLOCK
    if options.max_model_len is None:
        raise ConfigError(
            "Without prefix caching a block of a state spans the whole sequence, and no maximum length is known.",
            remedy="Give --max-model-len.",
        )
    return options.max_model_len


def _reader_block(layer: Layer, block_size: int, kernels: Kernels) -> int:
    """Tokens: layers with a window take the largest block within the engine's that their kernels read unsplit."""
    backend = kernels.of(layer)
    if backend is None or layer.kind.window is None:
        return block_size
    return max(block_size // backend.multiple, 1) * backend.multiple


def _layout(readers: Sequence[Layer], kernels: Kernels, options: EngineOptions) -> MemoryLayout:
    compressed = any(_compressed(layer) for layer in readers)
    layout = options.layout or ("block_outermost" if compressed else "layer_compact")
    if compressed and layout != "block_outermost":
        raise ConfigError(
            "Compressed latents (DeepSeek-V4) lie beside each other within a block: vLLM 0.32 refuses other layouts.",
            remedy="Use --memory-layout block-outermost, or leave it out.",
        )
    if layout == "block_outermost" and CPU_ATTN in kernels.all(readers):
        raise ConfigError(
            "CPU_ATTN reads layer-compact caches only (LBHNC).", remedy="Use --memory-layout layer-compact."
        )
    return layout


def _compressed(layer: Layer) -> bool:
    """Whether a layer is one of those that DeepSeek-V4 packs, which dictate their blocks."""
    match layer.cache:
        case Latent(block_size=int()):
            return True
    return False
