"""A geometry on the wire, and back."""

from __future__ import annotations

import msgspec

from connector.errors import ConfigError
from connector.plan.geometry import Geometry, Group, Region
from connector.plan.kinds import kind_from_wire
from connector.wire.messages import EngineDescription, GroupDescription, RegionDescription


def described_regions(geometry: Geometry) -> tuple[RegionDescription, ...]:
    """The regions, for a `RankDescription`."""
    return tuple(
        RegionDescription(
            base=region.base,
            stride=region.stride,
            page_bytes=region.page_bytes,
            num_blocks=region.num_blocks,
            device=region.device,
        )
        for region in geometry.regions
    )


def described_groups(geometry: Geometry) -> tuple[GroupDescription, ...]:
    """The groups, for an `EngineDescription`."""
    return tuple(
        GroupDescription(
            index=index,
            kind=group.kind.name,
            window=group.kind.window,
            num_layers=len(group.layers),
            block_size=group.block_size,
            page_bytes=geometry.regions[group.regions[0]].page_bytes,
            layers=group.layers,
            regions=group.regions,
        )
        for index, group in enumerate(geometry.groups)
    )


def geometry_of(engine: EngineDescription, rank: int = 0) -> Geometry:
    """A peer's described memory as a plan geometry. ConfigError when it is not one."""
    if rank >= len(engine.ranks):
        raise ConfigError(f"Engine {engine.engine_id} describes no rank {rank}.")
    regions = tuple(Region(**msgspec.structs.asdict(region)) for region in engine.ranks[rank].regions)
    groups = tuple(
        Group(
            kind=kind_from_wire(group.kind, group.window, None),
            block_size=group.block_size,
            layers=group.layers,
            regions=group.regions,
        )
        for group in engine.groups
    )
    return Geometry(regions, groups)
