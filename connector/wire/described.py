"""A geometry on the wire, and back."""

from __future__ import annotations

import msgspec

from connector.errors import ConfigError
from connector.plan.geometry import Geometry, Group, Page, Region, Share
from connector.plan.kinds import kind_from_wire
from connector.wire.messages import (
    EngineDescription,
    GroupDescription,
    PageDescription,
    RegionDescription,
    ShareDescription,
)


def described_regions(geometry: Geometry) -> tuple[RegionDescription, ...]:
    """The regions, for a `RankDescription`."""
    return tuple(
        RegionDescription(
            base=region.base,
            stride=region.stride,
            block_bytes=region.block_bytes,
            num_blocks=region.num_blocks,
            device=region.device,
        )
        for region in geometry.regions
    )


def described_shares(geometry: Geometry) -> tuple[ShareDescription, ...]:
    """What this rank holds of each group, for a `RankDescription`."""
    return tuple(
        ShareDescription(first=group.share.first, count=group.share.count, total=group.share.total)
        for group in geometry.groups
    )


def described_groups(geometry: Geometry) -> tuple[GroupDescription, ...]:
    """The groups, for an `EngineDescription`."""
    return tuple(
        GroupDescription(
            index=index,
            kind=group.kind.name,
            window=group.kind.window,
            chunk=group.kind.chunk,
            num_layers=len(group.layers),
            block_size=group.block_size,
            page_bytes=_first_page(group),
            layers=group.layers,
            pages=tuple(
                PageDescription(region=page.region, offset=page.offset, num_bytes=page.num_bytes)
                for page in group.pages
            ),
            kernel_blocks=group.kernel_blocks,
            cut=group.cut,
        )
        for index, group in enumerate(geometry.groups)
    )


def geometry_of(engine: EngineDescription, rank: int = 0) -> Geometry:
    """A peer's described memory as a plan geometry. ConfigError when it is not one."""
    if rank >= len(engine.ranks):
        raise ConfigError(f"Engine {engine.engine_id} describes no rank {rank}.")
    described = engine.ranks[rank]
    if len(described.shares) != len(engine.groups):
        raise ConfigError(f"Rank {rank} of engine {engine.engine_id} does not say what it holds of each group.")
    regions = tuple(Region(**msgspec.structs.asdict(region)) for region in described.regions)
    groups = tuple(
        Group(
            kind=kind_from_wire(group.kind, group.window, group.chunk),
            block_size=group.block_size,
            layers=group.layers,
            pages=tuple(Page(page.region, page.offset, page.num_bytes) for page in group.pages),
            share=Share(share.first, share.count, share.total),
            kernel_blocks=group.kernel_blocks,
            cut=group.cut,
        )
        for group, share in zip(engine.groups, described.shares, strict=True)
    )
    return Geometry(regions, groups)


def _first_page(group: Group) -> int:
    """Bytes of one block in the first layer: one page, or K's and V's."""
    pages_per_layer = 2 if len(group.pages) == 2 * len(group.layers) else 1
    return sum(page.num_bytes for page in group.pages[:pages_per_layer])
