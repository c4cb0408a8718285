"""Descriptions of small engines for tests without vLLM."""

from __future__ import annotations

from connector.plan.geometry import Geometry, Group, Page, Region
from connector.plan.kinds import Full, SlidingWindow
from connector.wire.described import described_groups, described_regions, described_shares
from connector.wire.messages import (
    CapacityDescription,
    EngineDescription,
    RankDescription,
)

PAGE = 64
BLOCK = 16
WINDOW = 40


def small_geometry(base: int = 1 << 20, num_blocks: int = 50) -> Geometry:
    """A sliding group of one layer and a full group of two, over two regions."""
    regions = tuple(
        Region(base=base + index * PAGE * num_blocks, stride=PAGE, block_bytes=PAGE, num_blocks=num_blocks)
        for index in range(2)
    )
    groups = (
        Group(kind=SlidingWindow(WINDOW), block_size=BLOCK, layers=("s0",), pages=(Page(0, 0, PAGE),)),
        Group(kind=Full(), block_size=BLOCK, layers=("f0", "f1"), pages=(Page(0, 0, PAGE), Page(1, 0, PAGE))),
    )
    return Geometry(regions, groups)


def engine_description(
    engine_id: str = "P",
    epoch: str = "e" * 32,
    *,
    geometry: Geometry | None = None,
    connection: bytes = b"",
    transport: str = "nixl",
) -> EngineDescription:
    """A description of `geometry` as an engine would give it."""
    geometry = geometry or small_geometry()
    return EngineDescription(
        engine_id=engine_id,
        epoch=epoch,
        role="kv_both",
        model="m",
        versions={"hma": "0"},
        fields={"model": "m", "kv_dtype": "auto", "hma": "on"},
        groups=described_groups(geometry),
        ranks=(
            RankDescription(
                transport=transport,
                memory="DRAM",
                connection=connection,
                regions=described_regions(geometry),
                shares=described_shares(geometry),
            ),
        ),
        num_blocks=geometry.num_blocks,
        hma_enabled=True,
        prefix_caching=False,
        capacity=CapacityDescription(request_tokens=0, hma_tokens=0, full_tokens=0),
    )
