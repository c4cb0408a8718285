"""Whether two engines fit: their descriptions compared field by field, as a whole, before anything is registered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from connector.errors import IncompatiblePeer
from connector.wire.messages import EngineDescription, GroupDescription

Verdict = Literal["refused", "compatible"]

REMEDIES = {
    "model": "Serve the same model, revision and weights on both engines.",
    "dtype": "Give both engines the same --dtype.",
    "kv_dtype": "Give both engines the same --kv-cache-dtype.",
    "tp_size": "Give both engines the same --tensor-parallel-size.",
    "block_size": "Give both engines the same --block-size, or sizes of which one divides the other.",
    "layout": "Give both engines the same KV cache layout (VLLM_KV_CACHE_LAYOUT).",
    "connector": "Install the same version of hma on both sides.",
    "verify_pages": "Set verify_pages on both engines, or on neither.",
    "vllm": "Run the same version of vLLM on both sides.",
}
_COMPARED = ("kind", "window", "chunk", "layers")
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
    ranks = sorted({(rank.transport, rank.memory) for rank in engine.ranks})
    return hashlib.sha256(msgspec.msgpack.encode((sorted(engine.fields.items()), groups, ranks))).digest()


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
    for name in _COMPARED:
        yield from _told(ours, theirs, name, lambda *_: "refused")
    exact = ours.fields.get("verify_pages") == "on"
    yield from _told(ours, theirs, "block_size", partial(_judge_blocks, exact))
    yield from _told(ours, theirs, "kernel_blocks", lambda *_: "compatible")  # `plan.join` judges what they mean


def _judge_blocks(exact: bool, kind: str, one: int, other: int) -> Verdict:
    """exact: pages are verified, which needs equal ones. A state lies in one block, whatever it is named for."""
    if kind == "state":
        return "refused" if exact else "compatible"
    return "refused" if exact or max(one, other) % min(one, other) else "compatible"


def _told(
    ours: EngineDescription, theirs: EngineDescription, name: str, judge: Callable[[str, Any, Any], Verdict]
) -> Iterator[Difference]:
    """Differences of one attribute of the groups: once where all groups differ alike, else by group."""
    pairs = [
        (index, getattr(mine, name), getattr(other, name))
        for index, (mine, other) in enumerate(zip(ours.groups, theirs.groups, strict=True))
    ]
    remedy = REMEDIES.get(name, _GROUP_REMEDY)
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    alike = len({(str(mine), str(other)) for _, mine, other in differing}) == 1 and len(differing) == len(pairs)
    for index, mine, other in differing[:1] if alike else differing:
        field = name if alike else f"groups[{index}].{name}"
        yield Difference(field, str(mine)[:200], str(other)[:200], judge(ours.groups[index].kind, mine, other), remedy)


def _ranks(ours: EngineDescription, theirs: EngineDescription) -> Iterator[Difference]:
    for name in ("transport", "memory"):
        mine, other = (", ".join(sorted({str(getattr(rank, name)) for rank in side.ranks})) for side in (ours, theirs))
        if mine != other:
            yield Difference(name, mine, other, "refused", "Use the same device kind on both sides.")
    if len(ours.ranks) != len(theirs.ranks):
        refused = ours.fields.get("verify_pages") == "on" or not theirs.ranks
        verdict: Verdict = "refused" if refused else "compatible"
        yield Difference("tp_size", str(len(ours.ranks)), str(len(theirs.ranks)), verdict, REMEDIES["tp_size"])
    yield from _shares(ours, theirs)
    yield from _pages(ours, theirs)


def _shares(ours: EngineDescription, theirs: EngineDescription) -> Iterator[Difference]:
    """Groups must be divided into the same parts, whoever holds which. States are divided by rank, and never cut."""
    for group in ours.groups:
        mine, other = (_parts(side, group.index) for side in (ours, theirs))
        if mine != other:
            field = f"groups[{group.index}] ({group.kind}).parts"
            yield Difference(field, str(mine), str(other), "refused", REMEDIES["tp_size"])


def _parts(engine: EngineDescription, index: int) -> list[int]:
    return sorted({rank.shares[index].total for rank in engine.ranks if index < len(rank.shares)})


def _pages(ours: EngineDescription, theirs: EngineDescription) -> Iterator[Difference]:
    """Joined pages must be of one size; everything a peer says is checked to be in range first."""
    fewest = min((len(rank.regions) for rank in theirs.ranks), default=0)
    alike = [[rank.shares for rank in side.ranks] for side in (ours, theirs)]
    for left, right in zip(ours.groups, theirs.groups, strict=False):
        name = f"groups[{left.index}].pages"
        if len(left.pages) != len(right.pages):
            yield Difference(name, str(len(left.pages)), str(len(right.pages)), "refused", REMEDIES["layout"])
            continue
        if any(page.region >= fewest for page in right.pages):
            yield Difference(name, "in range", "out of range", "refused", REMEDIES["connector"])
            continue
        pages = [page.num_bytes for page in left.pages]
        their_pages = [page.num_bytes for page in right.pages]
        if pages != their_pages and left.block_size == right.block_size and alike[0] == alike[1]:
            yield Difference(f"{name}.num_bytes", str(pages)[:200], str(their_pages)[:200], "refused", _GROUP_REMEDY)
