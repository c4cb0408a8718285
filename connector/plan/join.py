"""Which bytes of P's pages are which bytes of D's: two geometries joined, once for each pair of ranks.

A join knows nothing of requests. It cuts the pages of both sides into pieces that are contiguous on both: whole pages
where the two sides are alike, head slices under unequal tensor parallelism, smaller pieces where the kernel blocks or
the logical blocks differ. What cannot be joined is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from connector.errors import ConfigError
from connector.plan.geometry import Geometry, Group, Page, Strip


@dataclass(frozen=True, slots=True)
class Lane:
    """A piece of a group's blocks that moves as one descriptor.

    strip: index into `Join.strips`. phase: for blocks of unequal size, which of the smaller blocks within the larger
    one this is; None where every pair of blocks moves it.
    """

    group: int
    phase: int | None
    strip: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Strips of one region on either side, and the lanes that use them: rows that may merge with each other.

    strips: consecutive indices. shape: equal for bundles whose rows differ by a shift only.
    """

    strips: range
    lanes: tuple[Lane, ...]
    shape: tuple[object, ...]


@dataclass(frozen=True)
class Join:
    """D's rank `local` reads from P's rank `remote`.

    strips: (local page, remote page) of equal length, each a row of pages for all blocks. Row `s * num_blocks + b` is
    block b of strip s, on either side with that side's number of blocks.
    """

    local: Geometry
    remote: Geometry
    strips: tuple[tuple[Page, Page], ...]
    lanes: tuple[Lane, ...]

    @cached_property
    def local_strips(self) -> tuple[Strip, ...]:
        return tuple(self.local.strip(local) for local, _ in self.strips)

    @cached_property
    def remote_strips(self) -> tuple[Strip, ...]:
        return tuple(self.remote.strip(remote) for _, remote in self.strips)

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """The lanes by the pair of regions they join; strips are numbered so that a bundle's are consecutive."""
        starts = [
            index
            for index, (local, remote) in enumerate(self.strips)
            if not index or (local.region, remote.region) != _regions(self.strips[index - 1])
        ]
        by_strip: dict[int, list[Lane]] = {}
        for lane in self.lanes:
            by_strip.setdefault(lane.strip, []).append(lane)
        found = []
        for first, last in zip(starts, [*starts[1:], len(self.strips)], strict=True):
            strips = range(first, last)
            lanes = tuple(lane for strip in strips for lane in by_strip[strip])
            ours, theirs = _regions(self.strips[first])
            shape = (
                self.local.regions[ours].stride,
                self.remote.regions[theirs].stride,
                tuple((left.offset, right.offset, left.num_bytes) for left, right in self.strips[first:last]),
                tuple((lane.group, lane.phase, lane.strip - first) for lane in lanes),
            )
            found.append(Bundle(strips, lanes, shape))
        return tuple(found)


def join(local: Geometry, remotes: Sequence[Geometry], *, rank: int = 0, ranks: int = 1) -> dict[int, Join]:
    """Join D's rank with the ranks of P that hold what it needs.

    remotes: all ranks of P, in order. rank, ranks: D's. Returns P's rank to the join with it; a rank that holds nothing
    of use is absent. Where several ranks hold the same heads, D's rank r of n prefers P's rank r * len(remotes) // n,
    so that readers spread. ConfigError, naming the group, when the two sides do not fit.
    """
    if any(len(remote.groups) != len(local.groups) for remote in remotes):
        raise ConfigError("The two engines have different cache groups.")
    preferred = rank * len(remotes) // ranks
    order = sorted(range(len(remotes)), key=lambda index: (index - preferred) % len(remotes))
    pieces: dict[int, list[tuple[int, int | None, Page, Page]]] = {}
    for index, group in enumerate(local.groups):
        needed = set(group.share.parts)
        for source in order:
            theirs = remotes[source].groups[index]
            held = needed & set(theirs.share.parts)
            if held:
                needed -= held
                assert len(held) == max(held) - min(held) + 1, "ranks hold neighbouring heads"
                cut = _cut(index, group, theirs, range(min(held), max(held) + 1))
                pieces.setdefault(source, []).extend((index, *piece) for piece in cut)
        if needed:
            raise ConfigError(f"Group {index} ({group.kind.name}): no prefill rank holds parts {sorted(needed)}.")
    return {source: _numbered(local, remotes[source], pieces[source]) for source in sorted(pieces)}


def block_unit(local: int, remote: int) -> int:
    """Tokens of the smaller of two block sizes; ConfigError when it does not divide the larger."""
    small, large = sorted((local, remote))
    if large % small:
        raise ConfigError(
            "One block size must divide the other.",
            ours=local,
            theirs=remote,
            remedy="Give both engines the same --block-size.",
        )
    return small


def _numbered(local: Geometry, remote: Geometry, pieces: Sequence[tuple[int, int | None, Page, Page]]) -> Join:
    """Strips in the order of their regions, each once; lanes that point to them."""
    strips = sorted(
        {(ours, theirs) for _, _, ours, theirs in pieces},
        key=lambda pair: (*_regions(pair), pair[1].offset, pair[0].offset, pair[0].num_bytes),
    )
    if len(strips) * max(local.num_blocks, remote.num_blocks) >= 1 << 31:
        raise ConfigError(f"{len(strips)} strips of {max(local.num_blocks, remote.num_blocks)} blocks are too many.")
    numbers = {pair: number for number, pair in enumerate(strips)}
    lanes = tuple(Lane(group, phase, numbers[ours, theirs]) for group, phase, ours, theirs in pieces)
    return Join(local, remote, tuple(strips), lanes)


def _regions(pair: tuple[Page, Page]) -> tuple[int, int]:
    return pair[0].region, pair[1].region


def _cut(index: int, ours: Group, theirs: Group, parts: range) -> Iterator[tuple[int | None, Page, Page]]:
    """(phase, D's piece, P's piece) for every page of one group."""
    name = f"Group {index} ({ours.kind.name})"
    if ours.kind != theirs.kind:
        raise ConfigError(f"{name} is of another kind on the other side.", ours=ours.kind, theirs=theirs.kind)
    if len(ours.pages) != len(theirs.pages):
        raise ConfigError(f"{name} has another number of pages.", ours=len(ours.pages), theirs=len(theirs.pages))
    if ours.share.total != theirs.share.total:
        raise ConfigError(
            f"{name} is divided otherwise on the other side.",
            ours=f"{ours.share.total} parts",
            theirs=f"{theirs.share.total} parts",
            remedy="Give both engines the same --tensor-parallel-size.",
        )
    for mine, other in zip(ours.pages, theirs.pages, strict=True):
        for phase, left, right, size in _pieces(name, _inside(ours, mine), _inside(theirs, other), parts):
            yield (
                phase,
                Page(mine.region, mine.offset + left, size),
                Page(other.region, other.offset + right, size),
            )


@dataclass(frozen=True, slots=True)
class _Inside:
    """The order within a page: kernel blocks, in each the parts, in each the tokens. `divides`: whether tokens do."""

    divides: bool
    num_bytes: int
    block_size: int
    kernel_size: int
    first: int
    parts: int

    def token_bytes(self, name: str) -> int:
        """Bytes of one token of one part."""
        size, rest = divmod(self.num_bytes, self.block_size * self.parts)
        if rest:
            raise ConfigError(f"{name}: a page of {self.num_bytes} bytes does not divide into heads and tokens.")
        return size

    def offset(self, token: int, part: int, token_bytes: int) -> int:
        kernel_block, within = divmod(token, self.kernel_size)
        row = kernel_block * self.parts + part - self.first
        return (row * self.kernel_size + within) * token_bytes


def _inside(group: Group, page: Page) -> _Inside:
    return _Inside(
        group.kind.per_token,
        page.num_bytes,
        group.block_size,
        group.block_size // group.kernel_blocks,
        group.share.first,
        group.share.count,
    )


@lru_cache(maxsize=1024)
def _pieces(name: str, ours: _Inside, theirs: _Inside, parts: range) -> tuple[tuple[int | None, int, int, int], ...]:
    """(phase, offset in D's page, offset in P's page, bytes) of everything that is contiguous on both sides."""
    if ours == theirs and len(parts) == ours.parts:
        return ((None, 0, 0, ours.num_bytes),)
    if not ours.divides:
        if ours.num_bytes != theirs.num_bytes:
            raise ConfigError(f"{name}: states differ in size.", ours=ours.num_bytes, theirs=theirs.num_bytes)
        return ((None, 0, 0, ours.num_bytes),)
    token_bytes = ours.token_bytes(name)
    if token_bytes != theirs.token_bytes(name):
        raise ConfigError(
            f"{name}: one token of one head has another size on the other side.",
            ours=f"{token_bytes} bytes",
            theirs=f"{theirs.token_bytes(name)} bytes",
        )
    unit = block_unit(ours.block_size, theirs.block_size)
    step = block_unit(ours.kernel_size, theirs.kernel_size)
    found: list[tuple[int | None, int, int, int]] = []
    ratio = max(ours.block_size, theirs.block_size) // unit
    for phase in range(ratio):
        # The smaller block is read or written whole, the larger one from where this phase begins.
        our_start, their_start = (phase * unit if side.block_size > unit else 0 for side in (ours, theirs))
        rows = sorted(
            (
                theirs.offset(their_start + token, part, token_bytes),
                ours.offset(our_start + token, part, token_bytes),
            )
            for token in range(0, unit, step)
            for part in parts
        )
        found += _merged(phase if ratio > 1 else None, rows, step * token_bytes)
    return tuple(found)


def _merged(
    phase: int | None, rows: Sequence[tuple[int, int]], size: int
) -> Iterator[tuple[int | None, int, int, int]]:
    """Join (P offset, D offset) rows of `size` bytes, in the order of P's, that continue each other on both sides."""
    there, here = rows[0]
    length = size
    for right, left in rows[1:]:
        if (right, left) == (there + length, here + length):
            length += size
            continue
        yield phase, here, there, length
        there, here, length = right, left, size
    yield phase, here, there, length
