"""Where pages lie: regions and groups of one engine, as frozen values.

Addresses come from base, stride and page, never from tensor shapes once a region has been described.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from connector.errors import ConfigError
from connector.plan.kinds import Kind

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One contiguous registered range: one layer of every group that shares it.

    base: address of block 0, bytes. stride: bytes from block to block. page_bytes: bytes of one block that carry KV.
    num_blocks: blocks in the range. device: accelerator index, 0 for host memory.
    """

    base: int
    stride: int
    page_bytes: int
    num_blocks: int
    device: int = 0

    def __post_init__(self) -> None:
        if min(self.base, self.device) < 0 or min(self.stride, self.page_bytes, self.num_blocks) < 1:
            raise ConfigError(f"Not a memory region: {self!r}.")
        if self.page_bytes > self.stride:
            raise ConfigError(f"Pages of {self.page_bytes} bytes overlap at a stride of {self.stride} bytes.")

    @property
    def is_dense(self) -> bool:
        """Whether neighbouring pages touch, so that their descriptors can merge."""
        return self.stride == self.page_bytes

    @property
    def extent(self) -> int:
        """Bytes from the first page's start to the last page's end."""
        return self.stride * (self.num_blocks - 1) + self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One KV-cache group: the layers that share a block table.

    regions: for each layer with a cache of its own, in the group's order, the index into `Geometry.regions`
    (two indices a layer where K and V lie apart).
    """

    kind: Kind
    block_size: int
    layers: tuple[str, ...]
    regions: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1 or not self.layers or not self.regions:
            raise ConfigError(f"Not a cache group: {self!r}.")
        if len(set(self.regions)) != len(self.regions):
            raise ConfigError(f"A group names one region twice: {self.regions}.")


@dataclass(frozen=True)
class Geometry:
    """All regions and groups of one rank of one engine."""

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        known = range(len(self.regions))
        for group in self.groups:
            if any(index not in known for index in group.regions):
                raise ConfigError(f"A group refers to a region that does not exist: {group.regions}.")

    @cached_property
    def offsets(self) -> Indices:
        """First page index of each region when all pages are numbered region by region."""
        counts = np.fromiter((region.num_blocks for region in self.regions), np.int64, len(self.regions))
        starts: Indices = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[:-1]
        return starts

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool: a block id is valid in every region."""
        return min((region.num_blocks for region in self.regions), default=0)

    def page_bytes(self, group: Group) -> int:
        """Bytes of one block of `group` in all its layers together."""
        return sum(self.regions[index].page_bytes for index in group.regions)


def regions_of_tensor(
    *, base: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, num_blocks: int, device: int = 0
) -> tuple[Region, ...]:
    """Regions of one layer's cache tensor: one, or two where K and V lie in separate halves.

    base: address of element 0, bytes. shape and strides: in elements, as torch gives them. num_blocks: from vLLM's
    cache config. Accepted: `(num_blocks, …)` in any inner order that is dense within a block, and `(2, num_blocks, …)`.
    Anything else raises ConfigError: a wrong address would be worse than no start.
    """
    if len(shape) >= 2 and shape[0] == num_blocks:
        return (_region(base, shape, strides, itemsize, device),)
    if len(shape) >= 3 and shape[0] == 2 and shape[1] == num_blocks:
        halves = (base, base + strides[0] * itemsize)
        return tuple(_region(half, shape[1:], strides[1:], itemsize, device) for half in halves)
    raise ConfigError(
        f"Cannot tell the block dimension of a KV cache of shape {shape} with {num_blocks} blocks.",
        remedy="Supported: (num_blocks, …) and (2, num_blocks, …).",
    )


def _region(base: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, device: int) -> Region:
    inner = sorted(zip(strides[1:], shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size == 1:
            continue
        if stride != expected:
            raise ConfigError(f"A block of a KV cache with shape {shape} and strides {strides} is not contiguous.")
        expected *= size
    return Region(
        base=base, stride=strides[0] * itemsize, page_bytes=expected * itemsize, num_blocks=shape[0], device=device
    )
