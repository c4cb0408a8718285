"""A running server's own groups and regions: the same plan from them, and what differs from the offline one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from connector.errors import ConfigError
from connector.plan.geometry import Geometry, Group
from connector.wire.described import geometry_of
from connector.wire.messages import EngineDescription
from hma_cli.inspection.comparison import HandOver, lower_bound, ours
from hma_cli.inspection.engine import Engine
from hma_cli.inspection.inspect import GroupShape, Inspection, Request
from hma_cli.inspection.pool import Table

_ADDRESS = re.compile(
    r"(?:tcp://)?(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252}):(?P<port>[0-9]{1,5})/?"
)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that the running server does otherwise than planned."""

    field: str
    planned: str
    running: str


def address(text: str) -> tuple[str, int]:
    """Host and port of a control channel: `tcp://127.0.0.1:5600` or `127.0.0.1:5600`."""
    if text.startswith(("http://", "https://")):
        raise ConfigError(
            f"{text} is an HTTP address; --live asks over the control channel.",
            remedy="Give its address as tcp://HOST:PORT; `hma launch` shows it in the column `control`.",
        )
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ConfigError(f"{text!r} is not the address of a control channel.", remedy="Give tcp://HOST:PORT.")
    return match["host"].strip("[]"), int(match["port"])


def asked_of(running: EngineDescription, request: Request) -> Request:
    """The request with everything that the server's own settings decide.

    Block sizes are not among the described fields: unless given, the smallest of the server's groups is taken.
    """
    if not running.groups or not running.ranks:
        raise ConfigError("The server describes no KV cache: its engine is still starting.", remedy="Ask again later.")
    smallest = min(group.block_size for group in running.groups)
    return replace(
        request,
        prefill_tp=len(running.ranks),
        decode_tp=len(running.ranks),
        prefill_block_size=request.prefill_block_size or smallest,
        decode_block_size=request.decode_block_size or smallest,
        device="cpu" if running.ranks[0].memory == "DRAM" else "cuda",
        dtype=running.fields.get("dtype", request.dtype),
        kv_dtype=running.fields.get("kv_dtype", request.kv_dtype),
        prefix_caching=running.prefix_caching,
        num_blocks=running.num_blocks,
    )


def live(planned: Inspection, running: EngineDescription) -> Inspection:
    """The offline inspection with the server's groups and memory in the place of the planned ones.

    Both sides of the hand-over are this server.
    """
    ranks = tuple(geometry_of(running, rank) for rank in range(len(running.ranks)))
    engine = _engine(ranks, running)
    case: HandOver = replace(planned.case, prefill=engine, decode=engine)
    plan = ours(case)
    totals = planned.totals | {"hma": plan.total, "lower_bound": lower_bound(case, plan)}
    shapes = tuple(_shape(group) for group in ranks[0].groups)
    return replace(planned, groups=shapes, case=case, plan=plan, totals=totals)


def differences(planned: Inspection, found: Inspection, running: EngineDescription) -> tuple[Difference, ...]:
    """Everything in which the server is not as planned; empty when the plan is right."""
    return tuple(
        Difference(field=field, planned=str(one), running=str(other))
        for field, one, other in _compared(planned, found, running)
        if one != other
    )


def _compared(
    planned: Inspection, found: Inspection, running: EngineDescription
) -> Iterator[tuple[str, object, object]]:
    yield "HMA", planned.decode.hma, running.hma_enabled
    yield (
        "bytes a block",
        planned.decode.bytes_per_block,
        sum(region.block_bytes for region in found.case.decode.ranks[0].regions),
    )
    yield "groups", len(planned.groups), len(found.groups)
    # A server describes what moves of a page, without padding: the plan's own memory says the same of it.
    shapes = tuple(_shape(group) for group in planned.case.decode.ranks[0].groups)
    for index, (one, other) in enumerate(zip(shapes, found.groups, strict=False)):
        for name in ("kind", "block_size", "page_bytes"):
            yield f"groups[{index}].{name}", getattr(one, name), getattr(other, name)
        yield f"groups[{index}].layers", numbers(one.layers), numbers(other.layers)
    for name in ("descriptors", "num_bytes", "runs"):
        yield f"hma: {name}", getattr(planned.plan.total, name), getattr(found.plan.total, name)


def _engine(ranks: tuple[Geometry, ...], running: EngineDescription) -> Engine:
    groups = ranks[0].groups
    return Engine(
        tables=tuple(Table(group.kind, group.block_size) for group in groups),
        ranks=ranks,
        data_bytes=tuple(tuple(page.num_bytes for page in group.pages) for group in groups),
        prefix_caching=running.prefix_caching,
    )


def _shape(group: Group) -> GroupShape:
    per_layer = 2 if len(group.pages) == 2 * len(group.layers) else 1
    sizes = [page.num_bytes for page in group.pages]
    return GroupShape(
        kind=group.kind,
        block_size=group.block_size,
        layers=group.layers,
        page_bytes=tuple(sum(sizes[start : start + per_layer]) for start in range(0, len(sizes), per_layer)),
    )


def numbers(layers: Sequence[str]) -> list[int]:
    """The layers' numbers in the model, from names such as `model.layers.3.self_attn.attn` or `3.self_attn`."""
    return [int(match[1]) if (match := _LAYER.search(name)) else -1 for name in layers]
