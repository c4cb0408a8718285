"""Group kinds: what one kind of KV cache still reads when the next token is computed.

One kind is one small class. Adding a kind touches this file and its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from connector.errors import ConfigError


class Kind(Protocol):
    """What the plan asks of a kind."""

    @property
    def name(self) -> str:
        """The word of the vocabulary: `full`, `sliding_window`, `chunked_local`, `state`, `mla`."""

    @property
    def window(self) -> int | None:
        """Tokens a query sees including itself, or None where no window limits it."""

    @property
    def chunk(self) -> int | None:
        """Tokens in a chunk that queries do not see beyond, or None."""

    @property
    def per_token(self) -> bool:
        """Whether every position has bytes of its own, so that pages divide by tokens."""

    def live_range(self, num_tokens: int) -> range:
        """Token positions that the forward pass of position `num_tokens` reads from the cache.

        `num_tokens` positions, 0 to `num_tokens - 1`, have been computed.
        """

    def live_bytes(self, num_live: int, block_size: int, page_bytes: int) -> int:
        """Bytes of one layer that carry `num_live` live positions, out of pages of `page_bytes` bytes."""


class _PerToken:
    """Every position has bytes of its own, `page_bytes / block_size` each."""

    __slots__ = ()
    per_token: ClassVar[bool] = True

    def live_bytes(self, num_live: int, block_size: int, page_bytes: int) -> int:
        return num_live * page_bytes // block_size


@dataclass(frozen=True, slots=True)
class Full(_PerToken):
    """Attention over everything before: all positions stay live."""

    name: ClassVar[str] = "full"
    window: ClassVar[int | None] = None
    chunk: ClassVar[int | None] = None

    def live_range(self, num_tokens: int) -> range:
        return range(num_tokens)


@dataclass(frozen=True, slots=True)
class SlidingWindow(_PerToken):
    """Attention over the last `window` positions, the query's own among them.

    The query at position n reads n - window + 1 … n. With n tokens computed, position n is the next query, so the
    cache owes n - window + 1 … n - 1. Example: window 4 and 10 tokens computed; position 10 reads 7, 8, 9 (and 10).
    """

    window: int
    name: ClassVar[str] = "sliding_window"
    chunk: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        _require_positive("sliding window", self.window)

    def live_range(self, num_tokens: int) -> range:
        return range(max(0, num_tokens - self.window + 1), num_tokens)


@dataclass(frozen=True, slots=True)
class ChunkedLocal(_PerToken):
    """Attention within chunks of `chunk` positions: a query sees its own chunk up to itself.

    Example: chunk 4 and 10 tokens computed; position 10 lies in the chunk 8 … 11 and reads 8, 9. With 12 computed,
    position 12 opens a chunk and reads nothing.
    """

    chunk: int
    name: ClassVar[str] = "chunked_local"
    window: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        _require_positive("chunk", self.chunk)

    def live_range(self, num_tokens: int) -> range:
        return range(num_tokens // self.chunk * self.chunk, num_tokens)


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state (Mamba, gated delta net, short convolution): only the newest one is read.

    It stands for the last computed position, and vLLM keeps it in the block of that position. A state has a size of its
    own, whatever the number of tokens it stands for.
    """

    name: ClassVar[str] = "state"
    per_token: ClassVar[bool] = False
    window: ClassVar[int | None] = None
    chunk: ClassVar[int | None] = None

    def live_range(self, num_tokens: int) -> range:
        return range(max(0, num_tokens - 1), num_tokens)

    def live_bytes(self, num_live: int, block_size: int, page_bytes: int) -> int:  # noqa: ARG002
        return page_bytes if num_live else 0


@dataclass(frozen=True, slots=True)
class Mla(_PerToken):
    """Latent attention: one latent a token for all heads, the same on every rank.

    window: of layers that see only the last positions (DeepSeek-V4), else None.
    """

    window: int | None = None
    name: ClassVar[str] = "mla"
    chunk: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.window is not None:
            _require_positive("sliding window", self.window)

    def live_range(self, num_tokens: int) -> range:
        start = 0 if self.window is None else max(0, num_tokens - self.window + 1)
        return range(start, num_tokens)


NAMES = tuple(kind.name for kind in (Full, SlidingWindow, ChunkedLocal, State, Mla))


def kind_from_wire(name: str, window: int | None, chunk: int | None) -> Kind:
    """The kind that a peer's description names; ConfigError when this version has no such kind."""
    match name, window, chunk:
        case Full.name, None, None:
            return Full()
        case SlidingWindow.name, int(), None:
            return SlidingWindow(window)
        case ChunkedLocal.name, None, int():
            return ChunkedLocal(chunk)
        case State.name, None, None:
            return State()
        case Mla.name, _, None:
            return Mla(window)
    if name not in NAMES:
        raise ConfigError(f"Unknown group kind {name!r}.", remedy=f"This version knows: {', '.join(NAMES)}.")
    raise ConfigError(f"A group of kind {name!r} cannot have window {window!r} and chunk {chunk!r}.")


def _require_positive(what: str, tokens: int) -> None:
    if tokens < 1:
        raise ConfigError(f"A {what} must hold at least one token, not {tokens}.")


def blocks_covering(positions: range, block_size: int) -> range:
    """Block positions that hold `positions`: the minimal cover.

    Example: positions 47 … 99 in blocks of 16 lie in blocks 2 … 6.
    """
    if not positions:
        return range(positions.start // block_size, positions.start // block_size)
    return range(positions.start // block_size, -(-positions.stop // block_size))
