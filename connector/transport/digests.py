"""Digests of pages: P publishes one for each page it offers, D compares them with what has arrived.

They tell whether the bytes on D are the bytes that P had; they are no proof against somebody who can write either.
Host memory only.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import numpy as np

from connector.errors import ConfigError
from connector.plan.build import Pairs
from connector.plan.geometry import Geometry, Group, Rows
from connector.plan.join import Join

DIGEST_BYTES = 8


def published(geometry: Geometry, blocks: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
    """For each group the digests of these blocks: block by block, in each page by page. blocks: ids, by group."""
    return tuple(
        b"".join(page_digest(geometry, group, page, block) for block in ids for page in range(len(group.pages)))
        for group, ids in zip(geometry.groups, blocks, strict=True)
    )


def page_digest(geometry: Geometry, group: Group, page: int, block: int) -> bytes:
    """The digest of one page, from memory."""
    where = group.pages[page]
    region = geometry.regions[where.region]
    start = region.base + where.offset + block * region.stride
    content = (ctypes.c_char * where.num_bytes).from_address(start)
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def cut_out(digests: bytes, num_pages: int, start: int, stop: int) -> bytes:
    """The digests of the blocks from position `start` to `stop` of a group with `num_pages` pages a block."""
    size = num_pages * DIGEST_BYTES
    return digests[start * size : stop * size]


def differing_rows(join: Join, pairs: Sequence[Pairs], expected: Sequence[bytes]) -> tuple[Rows, Rows]:
    """Rows whose pages on D are not what P published, as (D's rows, P's rows).

    expected: for each group the digests of its pairs, in their order. ConfigError when they are not one for each page.
    """
    local: list[int] = []
    remote: list[int] = []
    for index, (group, pair, digests) in enumerate(zip(join.local.groups, pairs, expected, strict=True)):
        if len(digests) != len(pair) * len(group.pages) * DIGEST_BYTES:
            raise ConfigError(f"Group {index} has {len(digests)} bytes of digests for {len(pair)} blocks.")
        strips = _strips(join, index)
        if len(strips) != len(group.pages):
            raise ConfigError(f"The pages of group {index} are cut on their way, so their digests say nothing here.")
        for number, (here, there) in enumerate(zip(pair.local.tolist(), pair.remote.tolist(), strict=True)):
            for page, strip in enumerate(strips):
                at = (number * len(strips) + page) * DIGEST_BYTES
                if page_digest(join.local, group, page, here) != digests[at : at + DIGEST_BYTES]:
                    local.append(strip * join.local.num_blocks + here)
                    remote.append(strip * join.remote.num_blocks + there)
    rows = np.array(sorted(set(zip(local, remote, strict=True))), np.int32).reshape(-1, 2)
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


def _strips(join: Join, group: int) -> list[int]:
    """For each page of a group the strip that moves it."""
    return [lane.strip for lane in join.lanes if lane.group == group for _ in range(lane.pages)]
