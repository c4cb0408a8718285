"""What one layer keeps of a sequence, on one rank, before block sizes are chosen.

A `Layer` is one cache: a Falcon-H1 layer has two, a layer that reuses an earlier layer's cache has none and appears
nowhere. The architecture rules make layers from a config (`architectures`), `grouping` puts them into groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from connector.plan.kinds import ChunkedLocal, Full, Kind, Mla, SlidingWindow, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Keys and values of an attention layer.

    heads: KV heads on this rank. total_heads: in the model; with more ranks than heads, ranks share one.
    head_size, head_size_v: elements of one key and one value. item_bytes: of one element.
    """

    kind: Full | SlidingWindow | ChunkedLocal
    heads: int
    total_heads: int
    head_size: int
    head_size_v: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on this rank."""
        return self.heads * (self.head_size + self.head_size_v) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """A latent cache: one vector a token for all heads, the same on every rank.

    state_bytes: of one stored vector. tokens_per_state: tokens that one vector stands for (1, or DeepSeek-V4's
    compression ratio). block_size: where the layer dictates it, in tokens; None where the engine's applies.
    page_multiple: page sizes are rounded up to a multiple of this many bytes.
    """

    kind: Mla
    state_bytes: int
    tokens_per_state: int = 1
    block_size: int | None = None
    page_multiple: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, rounded up where one vector stands for several."""
        return -(-self.state_bytes // self.tokens_per_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A recurrent state: tensors of fixed shape on this rank, whatever the number of tokens.

    family: `mamba1`, `mamba2`, `gdn`, `kda`, `short_conv`. shapes: in elements, already divided by the number of ranks.
    item_bytes: one for each shape.
    """

    kind: State
    shapes: tuple[tuple[int, ...], ...]
    item_bytes: tuple[int, ...]
    family: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(prod(shape) * size for shape, size in zip(self.shapes, self.item_bytes, strict=True))


Cache = Attention | Latent | Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One cache of one layer. index: the layer's number in the model. part: `attn`, `mla`, `state`, `indexer`, ..."""

    index: int
    part: str
    cache: Cache

    @property
    def name(self) -> str:
        return f"layers.{self.index}.{self.part}"

    @property
    def kind(self) -> Kind:
        return self.cache.kind
