"""Whether two engines fit: their descriptions compared field by field, as a whole, before anything is registered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from connector.errors import IncompatiblePeer
from connector.wire.messages import EngineDescription, GroupDescription, RankDescription

Verdict = Literal["refused", "compatible"]

REMEDIES = {
    "model": "Serve the same model, revision and weights on both engines.",
    "dtype": "Give both engines the same --dtype.",
    "kv_dtype": "Give both engines the same --kv-cache-dtype.",
    "tp_size": "Give both engines the same --tensor-parallel-size.",
    "block_size": "Give both engines the same --block-size.",
    "layout": "Give both engines the same KV cache layout (VLLM_KV_CACHE_LAYOUT).",
    "connector": "Install the same version of hma on both sides.",
    "verify_pages": "Set verify_pages on both engines, or on neither.",
    "vllm": "Run the same version of vLLM on both sides.",
}
_COMPARED = ("kind", "window", "chunk", "block_size", "kernel_blocks", "page_bytes", "layers")
_GROUP_REMEDY = "Give both engines the same model, --block-size and hybrid KV cache manager setting."


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two engines differ. `compatible` differences are told, `refused` ones end the handshake."""

    field: str
    ours: str
    theirs: str
    verdict: Verdict
    remedy: str


def compare(ours: EngineDescription, theirs: EngineDescription) -> tuple[Difference, ...]:
    """Every difference between two engines, refusals first."""
    found = [*_fields(ours, theirs), *_groups(ours, theirs), *_ranks(ours, theirs)]
    if ours.num_blocks != theirs.num_blocks:
        found.append(Difference("num_blocks", str(ours.num_blocks), str(theirs.num_blocks), "compatible", ""))
    if ours.prefix_caching != theirs.prefix_caching:
        sides = str(ours.prefix_caching), str(theirs.prefix_caching)
        found.append(Difference("prefix_caching", *sides, "compatible", ""))
    return tuple(sorted(found, key=lambda difference: difference.verdict != "refused"))


def check(ours: EngineDescription, theirs: EngineDescription, *, our_name: str = "", their_name: str = "") -> None:
    """IncompatiblePeer, with every refused field, when the two do not fit. The names are for people."""
    refused = [difference for difference in compare(ours, theirs) if difference.verdict == "refused"]
    if refused:
        raise IncompatiblePeer(
            f"{their_name or f'Engine {theirs.engine_id}'} does not fit {our_name or 'this engine'}: "
            f"{', '.join(d.field for d in refused)}.",
            ours="; ".join(f"{d.field}={d.ours}" for d in refused),
            theirs="; ".join(f"{d.field}={d.theirs}" for d in refused),
            remedy=" ".join(dict.fromkeys(d.remedy for d in refused if d.remedy)),
        )


def fingerprint(engine: EngineDescription) -> bytes:
    """A digest of all that must be equal, so that P can refuse a claim of an engine that does not fit."""
    groups = [_comparable(group) for group in engine.groups]
    pages = [[page.num_bytes for page in group.pages] for group in engine.groups]
    ranks = [(rank.transport, rank.memory, rank.shares) for rank in engine.ranks]
    return hashlib.sha256(msgspec.msgpack.encode((sorted(engine.fields.items()), groups, pages, ranks))).digest()


def _fields(ours: EngineDescription, theirs: EngineDescription) -> Iterator[Difference]:
    for name in sorted(ours.fields.keys() | theirs.fields.keys()):
        mine, other = ours.fields.get(name, "absent"), theirs.fields.get(name, "absent")
        if mine != other:
            yield Difference(name, mine, other, "refused", REMEDIES.get(name, f"Make {name} equal on both engines."))


def _comparable(group: GroupDescription) -> dict[str, object]:
    return {name: getattr(group, name) for name in _COMPARED}


def _groups(ours: EngineDescription, theirs: EngineDescription) -> Iterator[Difference]:
    if len(ours.groups) != len(theirs.groups):
        yield Difference("groups", str(len(ours.groups)), str(len(theirs.groups)), "refused", _GROUP_REMEDY)
        return
    pairs = [(_comparable(mine), _comparable(other)) for mine, other in zip(ours.groups, theirs.groups, strict=True)]
    blocks_differ = any(left["block_size"] != right["block_size"] for left, right in pairs)
    for name in pairs[0][0] if pairs else ():
        if name == "page_bytes" and blocks_differ:
            continue  # a consequence, and the cause has been named
        sides = [(str(left[name])[:200], str(right[name])[:200]) for left, right in pairs]
        differing = [index for index, (left, right) in enumerate(sides) if left != right]
        remedy = REMEDIES.get(name, _GROUP_REMEDY)
        if differing and len({sides[index] for index in differing}) == 1 and len(differing) == len(pairs):
            yield Difference(name, *sides[0], "refused", remedy)
        else:
            yield from (Difference(f"groups[{index}].{name}", *sides[index], "refused", remedy) for index in differing)


def _ranks(ours: EngineDescription, theirs: EngineDescription) -> Iterator[Difference]:
    if len(ours.ranks) != len(theirs.ranks):
        sides = str(len(ours.ranks)), str(len(theirs.ranks))
        yield Difference("ranks", *sides, "refused", REMEDIES["tp_size"])
        return
    for index, (mine, other) in enumerate(zip(ours.ranks, theirs.ranks, strict=True)):
        for name in ("transport", "memory"):
            if getattr(mine, name) != getattr(other, name):
                sides = str(getattr(mine, name)), str(getattr(other, name))
                yield Difference(f"ranks[{index}].{name}", *sides, "refused", "Use the same device kind on both sides.")
        if mine.shares != other.shares:
            sides = str(mine.shares)[:200], str(other.shares)[:200]
            yield Difference(f"ranks[{index}].shares", *sides, "refused", REMEDIES["tp_size"])
        yield from _pages(index, ours, theirs, other)


def _pages(
    index: int, ours: EngineDescription, theirs: EngineDescription, other: RankDescription
) -> Iterator[Difference]:
    """Joined pages must be of one size; everything a peer says is checked to be in range first."""
    for left, right in zip(ours.groups, theirs.groups, strict=False):
        name = f"ranks[{index}].groups[{left.index}].pages"
        if len(left.pages) != len(right.pages):
            yield Difference(name, str(len(left.pages)), str(len(right.pages)), "refused", REMEDIES["layout"])
            continue
        if any(page.region >= len(other.regions) for page in right.pages):
            yield Difference(name, "in range", "out of range", "refused", REMEDIES["connector"])
            continue
        pages = [page.num_bytes for page in left.pages]
        their_pages = [page.num_bytes for page in right.pages]
        if pages != their_pages and left.block_size == right.block_size:
            yield Difference(f"{name}.num_bytes", str(pages)[:200], str(their_pages)[:200], "refused", _GROUP_REMEDY)
