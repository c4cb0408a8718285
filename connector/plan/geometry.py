"""Where pages lie: regions, pages and groups of one rank of one engine, as frozen values.

Addresses come from base, stride, offset and length, never from tensor shapes once a page has been described.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from connector.errors import ConfigError
from connector.plan.kinds import Kind

Indices = npt.NDArray[np.int64]
"""Block ids or positions."""

Rows = npt.NDArray[np.int32]
"""Rows of a `plan.Join`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One contiguous registered range in which block b starts at `base + b * stride`.

    base: address of block 0, bytes. stride: bytes from block to block. block_bytes: bytes from a block's start that
    belong to it. num_blocks: blocks in the range. device: accelerator index, 0 for host memory.
    """

    base: int
    stride: int
    block_bytes: int
    num_blocks: int
    device: int = 0

    def __post_init__(self) -> None:
        if min(self.base, self.device) < 0 or min(self.stride, self.block_bytes, self.num_blocks) < 1:
            raise ConfigError(f"Not a memory region: {self!r}.")
        if self.block_bytes > self.stride:
            raise ConfigError(f"Blocks of {self.block_bytes} bytes overlap at a stride of {self.stride} bytes.")

    @property
    def extent(self) -> int:
        """Bytes from the first block's start to the last block's end."""
        return self.stride * (self.num_blocks - 1) + self.block_bytes


@dataclass(frozen=True, slots=True)
class Page:
    """A block's bytes in one layer, or in its K or V half: `num_bytes` from `offset` within a block of `region`.

    region: index into `Geometry.regions`. Only bytes that carry KV or state are counted, not padding.
    """

    region: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a group's parts this rank holds: `count` of `total`, from number `first`.

    The parts of an attention group are its KV heads, those of a state the ranks it is divided among. A latent cache has
    one part, which every rank holds.
    """

    first: int = 0
    count: int = 1
    total: int = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1 or self.first + self.count > self.total:
            raise ConfigError(f"Not a share of a group: {self!r}.")

    @property
    def parts(self) -> range:
        return range(self.first, self.first + self.count)


Cut = Literal["whole", "heads", "tokens"]
"""What a kernel block may be cut into: nothing, its heads, or its heads and their tokens.

A backend may keep the bytes of a head in an order of its own, and then no token of it can be told from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One KV-cache group: the layers that share a block table.

    pages: for each layer with a cache of its own, in the group's order, where its block lies (two pages a layer where K
    and V lie apart). kernel_blocks: into how many kernel blocks a block is cut. A page is ordered by kernel block, then
    by part (`share`), then by token, as far as `cut` says.
    """

    kind: Kind
    block_size: int
    layers: tuple[str, ...]
    pages: tuple[Page, ...]
    share: Share = field(default_factory=Share)
    kernel_blocks: int = 1
    cut: Cut = "tokens"

    def __post_init__(self) -> None:
        if min(self.block_size, self.kernel_blocks) < 1 or not self.layers or not self.pages:
            raise ConfigError(f"Not a cache group: {self!r}.")
        if self.block_size % self.kernel_blocks:
            raise ConfigError(f"A block of {self.block_size} tokens does not divide into {self.kernel_blocks}.")
        if len(set(self.pages)) != len(self.pages):
            raise ConfigError(f"A group names one page twice: {self.pages}.")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return sum(page.num_bytes for page in self.pages)


@dataclass(frozen=True, slots=True)
class Geometry:
    """All regions and groups of one rank of one engine."""

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        known = range(len(self.regions))
        for group in self.groups:
            for page in group.pages:
                if page.region not in known:
                    raise ConfigError(f"A group refers to region {page.region}, which does not exist.")
                room = self.regions[page.region].block_bytes
                if page.num_bytes < 1 or not 0 <= page.offset <= room - page.num_bytes:
                    raise ConfigError(f"{page!r} does not lie in a block of {room} bytes.")

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool: a block id is valid in every region."""
        return min((region.num_blocks for region in self.regions), default=0)

    def strip(self, page: Page) -> Strip:
        """One page of all blocks."""
        region = self.regions[page.region]
        return Strip(
            base=region.base + page.offset,
            num_bytes=page.num_bytes,
            stride=region.stride,
            count=self.num_blocks,
            device=region.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The same bytes of every block of one rank: `num_bytes` at `base + b * stride` for b in 0 … count - 1."""

    base: int
    num_bytes: int
    stride: int
    count: int
    device: int


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache: a region, or two where K and V lie apart. kernel_blocks: into how many a block is cut."""

    regions: tuple[Region, ...]
    kernel_blocks: int = 1


def cache_of_tensor(
    *, base: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, num_blocks: int, device: int = 0
) -> Cache:
    """Where one layer's cache tensor keeps its blocks.

    base: address of element 0, bytes. shape and strides: in elements, as torch gives them. num_blocks: from vLLM's
    cache config. Accepted: `(num_blocks, …)` in any inner order that is dense within a block, `(k * num_blocks, …)`
    where each block is cut into k kernel blocks that lie side by side, and `(2, …)` of either, for K and V.
    Anything else raises ConfigError: a wrong address would be worse than no start.
    """

    def region(address: int, dims: tuple[int, ...], steps: tuple[int, ...]) -> tuple[Region, int]:
        return _region(address, dims, steps, itemsize, num_blocks, device)

    if shape and shape[0] != num_blocks and len(shape) >= 3 and shape[0] == 2 and shape[1] % num_blocks == 0:
        halves = (region(base + half * strides[0] * itemsize, shape[1:], strides[1:]) for half in range(2))
        (keys, ratio), (values, _) = halves
        return Cache((keys, values), ratio)
    if len(shape) >= 2 and shape[0] and shape[0] % num_blocks == 0:
        only, ratio = region(base, shape, strides)
        return Cache((only,), ratio)
    raise ConfigError(
        f"Cannot tell the block dimension of a KV cache of shape {shape} with {num_blocks} blocks.",
        remedy="Supported: (num_blocks, …), (kernel blocks, …) and (2, num_blocks, …).",
    )


def _region(
    base: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, num_blocks: int, device: int
) -> tuple[Region, int]:
    """The region of whole blocks, and into how many kernel blocks each is cut."""
    ratio = shape[0] // num_blocks
    inner = sorted(zip(strides[1:], shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size == 1:
            continue
        if stride != expected:
            raise ConfigError(f"A block of a KV cache with shape {shape} and strides {strides} is not contiguous.")
        expected *= size
    if ratio > 1 and strides[0] != expected:
        raise ConfigError(f"The kernel blocks of a KV cache with shape {shape} and strides {strides} lie apart.")
    region = Region(
        base=base,
        stride=strides[0] * itemsize * ratio,
        block_bytes=expected * itemsize * ratio,
        num_blocks=num_blocks,
        device=device,
    )
    return region, ratio
