"""Layers with a block size: pages, and what may be done to them so that layers can share a block table.

A page is what one block takes in one layer. vLLM's own specs are in `v1/kv_cache_interface.py`; the three classes here
answer what grouping asks of them. `paged` chooses the class once, by the kind of cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from connector.errors import ConfigError
from connector.plan.kinds import Full, Kind
from hma_cli.models.caches import Attention, Latent, Layer, Recurrent


class PageMisfit(ConfigError):
    """A layer whose page can be brought to the size of the largest page neither by a larger block nor by padding."""


class Paged(Protocol):
    """One layer, its block size and its page."""

    @property
    def layer(self) -> Layer: ...

    @property
    def block_size(self) -> int:
        """Tokens."""

    @property
    def kind(self) -> Kind:
        """How its blocks are kept: its own kind, or full where it is allocated as full attention."""

    @property
    def page_bytes(self) -> int:
        """As allocated, padding included."""

    @property
    def data_bytes(self) -> int:
        """Of `page_bytes`, those that carry KV or state."""

    @property
    def identity(self) -> object:
        """Hashable; equal for layers that are alike in everything that vLLM's spec of a layer says."""

    @property
    def family(self) -> object:
        """Hashable; equal for layers that may share a block table, given equal block sizes, whatever their pages."""

    @property
    def checkpoints(self) -> int:
        """Blocks that a request may hold in prefill beyond those it needs otherwise."""

    @property
    def promotable(self) -> bool:
        """Whether it keeps only what is near and could be allocated as full attention instead."""

    @property
    def token_based(self) -> bool:
        """Whether a kernel reads its blocks by token, so that a backend restricts the block size."""

    def filling(self, page_bytes: int) -> Paged:
        """The same layer with pages of `page_bytes`, more than now. PageMisfit where that cannot be."""

    def promoted(self, block_size: int) -> Paged:
        """The same layer, allocated as full attention in blocks of `block_size`."""


def paged(layer: Layer, block_size: int, *, padded_to: int = 0) -> Paged:
    """`layer` in blocks of `block_size` tokens, its pages padded to `padded_to` bytes (0: not padded)."""
    match layer.cache:
        case Attention() as cache:
            return AttentionPages(layer=layer, cache=cache, block_size=block_size, padded_to=padded_to, kind=layer.kind)
        case Latent() as cache:
            return LatentPages(layer=layer, cache=cache, block_size=cache.block_size or block_size, padded_to=padded_to)
        case Recurrent() as cache:
            return StatePages(layer=layer, cache=cache, block_size=block_size, padded_to=padded_to)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPages:
    """Keys and values: a page grows with the block, and may have padding behind it."""

    layer: Layer
    cache: Attention
    block_size: int
    padded_to: int
    kind: Kind

    @property
    def data_bytes(self) -> int:
        return self.block_size * self.cache.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.padded_to or self.data_bytes

    @property
    def identity(self) -> object:
        # A spec holds the heads of this rank; how many ranks share one is not part of it.
        return replace(self.cache, total_heads=0), self.kind, self.block_size, self.padded_to

    @property
    def family(self) -> object:
        return self.kind

    @property
    def checkpoints(self) -> int:
        return 0

    @property
    def promotable(self) -> bool:
        return self.kind.window is not None or self.kind.chunk is not None

    @property
    def token_based(self) -> bool:
        return True

    def filling(self, page_bytes: int) -> Paged:
        if page_bytes % self.page_bytes == 0:
            return replace(self, block_size=self.block_size * (page_bytes // self.page_bytes))
        return replace(self, padded_to=page_bytes)

    def promoted(self, block_size: int) -> Paged:
        return replace(self, block_size=block_size, kind=Full())


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPages:
    """Latents: a page grows with the block, rounded up to the layer's own multiple.

    Only layers with a window can be padded beyond that: kernels index the cache of the others in whole rows.
    """

    layer: Layer
    cache: Latent
    block_size: int
    padded_to: int

    @property
    def kind(self) -> Kind:
        return self.cache.kind

    @property
    def data_bytes(self) -> int:
        return self.block_size // self.cache.tokens_per_state * self.cache.state_bytes

    @property
    def page_bytes(self) -> int:
        multiple = self.cache.page_multiple
        return self.padded_to or -(-self.data_bytes // multiple) * multiple

    @property
    def identity(self) -> object:
        return replace(self.cache, block_size=None), self.block_size, self.padded_to

    @property
    def family(self) -> object:
        # Latents that keep every token share a table with full attention: MLAAttentionSpec is a FullAttentionSpec.
        return Full() if self.kind.window is None else self.kind

    @property
    def checkpoints(self) -> int:
        return 0

    @property
    def promotable(self) -> bool:
        return self.kind.window is not None

    @property
    def token_based(self) -> bool:
        return self.cache.block_size is None

    def filling(self, page_bytes: int) -> Paged:
        if page_bytes % self.page_bytes == 0:
            larger = replace(self, block_size=self.block_size * (page_bytes // self.page_bytes))
        elif self.kind.window is not None and self.data_bytes % self.cache.page_multiple == 0:
            larger = replace(self, padded_to=page_bytes)
        elif self.kind.window is not None:
            raise self._unrounded(page_bytes)
        else:
            raise PageMisfit(
                f"{self.layer.name}: a page of {self.page_bytes:,} bytes does not divide the largest page of "
                f"{page_bytes:,} bytes, and pages of latents cannot be padded.",
                remedy="Use --memory-layout block-outermost, which takes pages of different sizes.",
            )
        if larger.page_bytes != page_bytes:
            raise self._unrounded(page_bytes)
        return larger

    def _unrounded(self, page_bytes: int) -> ConfigError:
        return ConfigError(
            f"{self.layer.name}: pages are rounded to {self.cache.page_multiple} bytes and cannot become "
            f"{page_bytes:,} bytes.",
            remedy="Use --memory-layout block-outermost, which takes pages of different sizes.",
        )

    def promoted(self, block_size: int) -> Paged:  # noqa: ARG002
        raise ConfigError(
            f"{self.layer.name}: vLLM 0.32 cannot allocate latents with a window as full attention, so it does not "
            "start this model without HMA.",
            remedy="Leave HMA on.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePages:
    """A recurrent state: one page holds one state, whatever the block size; padding makes up the rest."""

    layer: Layer
    cache: Recurrent
    block_size: int
    padded_to: int

    @property
    def kind(self) -> Kind:
        return self.cache.kind

    @property
    def data_bytes(self) -> int:
        return self.cache.num_bytes

    @property
    def page_bytes(self) -> int:
        return self.padded_to or self.data_bytes

    @property
    def identity(self) -> object:
        return self.cache, self.block_size, self.padded_to

    @property
    def family(self) -> object:
        return self.kind, self.page_bytes, self.checkpoints

    @property
    def checkpoints(self) -> int:
        # MambaMixer2.get_kv_cache_spec: a state at a block boundary inside a step is kept beside the running one.
        return 1 if self.cache.family == "mamba2" else 0

    @property
    def promotable(self) -> bool:
        return False

    @property
    def token_based(self) -> bool:
        return False

    def filling(self, page_bytes: int) -> Paged:
        return replace(self, padded_to=page_bytes)

    def promoted(self, block_size: int) -> Paged:  # noqa: ARG002
        raise ConfigError(f"{self.layer.name}: a state cannot be allocated as full attention.", remedy="Leave HMA on.")
