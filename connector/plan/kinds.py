"""Group kinds: what one kind of KV cache still reads when the next token is computed.

One kind is one small class. Adding a kind touches this file and its test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from connector.errors import ConfigError


class Kind(Protocol):
    """What the plan asks of a kind."""

    @property
    def name(self) -> str:
        """The word of the vocabulary: `full`, `sliding_window`, ..."""

    @property
    def window(self) -> int | None:
        """Tokens a query sees including itself, or None where everything is seen."""

    def live_range(self, num_tokens: int) -> range:
        """Token positions that the forward pass of position `num_tokens` reads from the cache.

        `num_tokens` positions, 0 to `num_tokens - 1`, have been computed.
        """


@dataclass(frozen=True, slots=True)
class Full:
    """Attention over everything before: all positions stay live."""

    name: ClassVar[str] = "full"
    window: ClassVar[int | None] = None

    def live_range(self, num_tokens: int) -> range:
        return range(num_tokens)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Attention over the last `window` positions, the query's own among them.

    The query at position n reads n - window + 1 … n. With n tokens computed, position n is the next query, so the
    cache owes n - window + 1 … n - 1. Example: window 4 and 10 tokens computed; position 10 reads 7, 8, 9 (and 10).
    """

    window: int
    name: ClassVar[str] = "sliding_window"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"A sliding window must hold at least one token, not {self.window}.")

    def live_range(self, num_tokens: int) -> range:
        return range(max(0, num_tokens - self.window + 1), num_tokens)


def kind_from_wire(name: str, window: int | None) -> Kind:
    """The kind that a peer's description names; ConfigError when this version has no such kind."""
    makers: Mapping[str, type] = {Full.name: Full, SlidingWindow.name: SlidingWindow}
    if name not in makers:
        raise ConfigError(f"Unknown group kind {name!r}.", remedy=f"This version moves: {', '.join(sorted(makers))}.")
    return Full() if window is None and name == Full.name else SlidingWindow(_required_window(name, window))


def _required_window(name: str, window: int | None) -> int:
    if name != SlidingWindow.name or window is None:
        raise ConfigError(f"A group of kind {name!r} cannot have window {window!r}.")
    return window


def blocks_covering(positions: range, block_size: int) -> range:
    """Block positions that hold `positions`: the minimal cover.

    Example: positions 47 … 99 in blocks of 16 lie in blocks 2 … 6.
    """
    if not positions:
        return range(positions.start // block_size, positions.start // block_size)
    return range(positions.start // block_size, -(-positions.stop // block_size))
