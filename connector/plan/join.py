"""Which bytes of P's pages are which bytes of D's: two geometries joined, once for each pair of ranks.

A join knows nothing of requests. It cuts the pages of both sides into pieces that are contiguous on both: whole pages
where the two sides are alike, head slices under unequal tensor parallelism, smaller pieces where the kernel blocks or
the logical blocks differ. What cannot be joined is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from connector.errors import ConfigError
from connector.plan.geometry import Cut, Geometry, Group, Page, Strip


@dataclass(frozen=True, slots=True)
class Lane:
    """A piece of a group's blocks that moves as one row.

    strip: index into `Join.strips`. phase: for blocks of unequal size, which of the smaller blocks within the larger
    one this is; None where every pair of blocks moves it. pages: how many pages the piece holds, 1 or more.
    """

    group: int
    phase: int | None
    strip: int
    pages: int


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
    def lanes_of(self) -> tuple[tuple[Lane, ...], ...]:
        """For each strip the lanes that use it: several groups where they share a region."""
        found: list[list[Lane]] = [[] for _ in self.strips]
        for lane in self.lanes:
            found[lane.strip].append(lane)
        return tuple(map(tuple, found))

    def is_dense(self, strip: int) -> bool:
        """Whether a strip's rows touch each other on both sides. Only then, and within one strip, does NIXL merge."""
        return all(side.num_bytes == side.stride for side in (self.local_strips[strip], self.remote_strips[strip]))


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
    pieces: dict[int, list[_Piece]] = {}
    for index, group in enumerate(local.groups):
        needed = set(group.share.parts)
        for source in order:
            theirs = remotes[source].groups[index]
            held = needed & set(theirs.share.parts)
            if held:
                needed -= held
                assert len(held) == max(held) - min(held) + 1, "ranks hold neighbouring heads"
                pieces.setdefault(source, []).extend(_cut(index, group, theirs, range(min(held), max(held) + 1)))
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a group's blocks, on both sides. pages: how many pages it holds, or is part of."""

    group: int
    phase: int | None
    local: Page
    remote: Page
    pages: int = 1

    def followed_by(self, other: _Piece) -> bool:
        """Whether `other` begins where this ends, on both sides, for every block."""
        return (
            self.phase is None
            and other.phase is None
            and all(
                one.region == two.region and one.offset + one.num_bytes == two.offset
                for one, two in ((self.local, other.local), (self.remote, other.remote))
            )
        )

    def with_next(self, other: _Piece) -> _Piece:
        size = self.local.num_bytes + other.local.num_bytes
        return replace(
            self,
            local=replace(self.local, num_bytes=size),
            remote=replace(self.remote, num_bytes=size),
            pages=self.pages + other.pages,
        )


def _numbered(local: Geometry, remote: Geometry, pieces: Sequence[_Piece]) -> Join:
    """Strips in the order of their regions, each once; lanes that point to them."""
    strips = sorted(
        {(piece.local, piece.remote) for piece in pieces},
        key=lambda pair: tuple((page.region, page.offset, page.num_bytes) for page in pair),
    )
    if len(strips) * max(local.num_blocks, remote.num_blocks) >= 1 << 31:
        raise ConfigError(f"{len(strips)} strips of {max(local.num_blocks, remote.num_blocks)} blocks are too many.")
    numbers = {pair: number for number, pair in enumerate(strips)}
    lanes = tuple(Lane(piece.group, piece.phase, numbers[piece.local, piece.remote], piece.pages) for piece in pieces)
    return Join(local, remote, tuple(strips), lanes)


def _cut(index: int, ours: Group, theirs: Group, parts: range) -> list[_Piece]:
    """The pieces of one group: its pages cut where they must be, and joined where they lie side by side."""
    name = f"Group {index} ({ours.kind.name})"
    _require_alike(name, ours, theirs)
    found: list[_Piece] = []
    for mine, other in zip(ours.pages, theirs.pages, strict=True):
        for phase, left, right, size in _pieces(name, _inside(ours, mine), _inside(theirs, other), parts):
            piece = _Piece(
                index,
                phase,
                Page(mine.region, mine.offset + left, size),
                Page(other.region, other.offset + right, size),
            )
            if found and found[-1].followed_by(piece):
                found[-1] = found[-1].with_next(piece)
            else:
                found.append(piece)
    return found


def _require_alike(name: str, ours: Group, theirs: Group) -> None:
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


@dataclass(frozen=True, slots=True)
class _Inside:
    """The order within a page: kernel blocks, in each the parts, in each the tokens. `divides`: whether tokens do."""

    divides: bool
    num_bytes: int
    block_size: int
    kernel_size: int
    first: int
    parts: int
    cut: Cut

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
        group.cut,
    )


def _require_cuts(name: str, ours: _Inside, theirs: _Inside, parts: range) -> None:
    """ConfigError where a kernel block would have to be cut in a way that its backend does not allow."""
    cuts = {ours.cut, theirs.cut}
    if ours.kernel_size != theirs.kernel_size and cuts != {"tokens"}:
        raise ConfigError(
            f"{name}: the attention backend keeps blocks that cannot be cut between tokens.",
            ours=f"blocks of {ours.kernel_size} tokens",
            theirs=f"blocks of {theirs.kernel_size} tokens",
            remedy="Give both engines the same --block-size.",
        )
    if len(parts) != max(ours.parts, theirs.parts) and "whole" in cuts:
        raise ConfigError(
            f"{name}: the attention backend keeps blocks that cannot be cut between heads.",
            ours=f"{ours.parts} heads",
            theirs=f"{theirs.parts} heads",
            remedy="Give both engines the same --tensor-parallel-size.",
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
    _require_cuts(name, ours, theirs, parts)
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
