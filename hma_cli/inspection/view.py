"""An inspection as a `Result`: schema `hma.plan/1`, tables, the picture of the sequence, and what to say about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hma_cli.inspection.comparison import Amount
from hma_cli.inspection.explain import explain
from hma_cli.inspection.inspect import PLANS, GroupShape, Held, Inspection
from hma_cli.inspection.merging import reasons
from hma_cli.report.result import Exit, Finding, Picture, Result, Span, Table

if TYPE_CHECKING:
    from connector.wire.messages import EngineDescription
    from hma_cli.inspection.live import Difference

SCHEMA = "hma.plan/1"
NAMES = {
    "no_hma": "without HMA",
    "in_tree": "in-tree connector",
    "hma": "hma",
    "lower_bound": "live tokens only",
}
STYLES = {
    "dead": ("·", "dim", "dead"),
    "cached": ("▒", "cyan", "live, cached on D"),
    "moves": ("█", "green", "live, moves"),
}


def view(found: Inspection, *, group: int | None = None) -> Result:
    """Everything about one model. group: the one whose arithmetic is walked through."""
    return Result(
        schema=SCHEMA,
        data=document(found),
        text=explain(found, group) if group is not None else "",
        tables=(_groups(found), _plans(found), _capacity(found)),
        pictures=(_picture(found),),
        records=tuple(_records(found)),
        findings=tuple(_findings(found)),
    )


def live_view(
    found: Inspection, running: EngineDescription, different: tuple[Difference, ...], *, group: int | None = None
) -> Result:
    """The view of a running server, and how it differs from the plan; exit code 1 if it does."""
    result = view(found, group=group)
    server = {"engine_id": running.engine_id, "epoch": running.epoch, "versions": dict(running.versions)}
    problems = tuple(
        Finding(level="problem", text=f"{one.field}: planned {one.planned}, running {one.running}.")
        for one in different
    )
    same = Finding(level="ok", text=f"Engine {running.engine_id} has exactly the groups and pages that were planned.")
    return replace(
        result,
        data=result.data
        | {
            "live": server | {"num_blocks": running.num_blocks},
            "differences": [{"field": one.field, "planned": one.planned, "running": one.running} for one in different],
        },
        findings=(*(problems or (same,)), *result.findings),
        exit_code=Exit.CHECK_FAILED if different else Exit.OK,
    )


def compared(one: Inspection, other: Inspection) -> Result:
    """Two models' totals side by side; the first is the one that the ratios refer to."""
    rows: list[tuple[object, ...]] = []
    for name in PLANS:
        left, right = one.totals[name], other.totals[name]
        rows += [
            (f"{NAMES[name]}: {key}", _of(left, key), _of(right, key), _ratio(right, left, key))
            for key in ("descriptors", "runs", "bytes")
        ]
    left_tokens, right_tokens = one.capacity.decoding.tokens, other.capacity.decoding.tokens
    rows.append(("KV capacity, tokens", left_tokens, right_tokens, _times(right_tokens, left_tokens)))
    title = f"{one.request.prompt_tokens:,} prompt tokens"
    columns = ("", one.config.name, other.config.name, "ratio")
    return Result(
        schema=SCHEMA,
        data=document(one) | {"compare": document(other)},
        tables=(
            _groups(one),
            _groups(other),
            Table(title=title, columns=columns, rows=tuple(rows), right=columns[1:]),
        ),
        records=(*_records(one), *_records(other)),
        findings=(*_source(one), *_source(other)),
    )


def document(found: Inspection) -> dict[str, Any]:
    """The data of `hma.plan/1`. Keys may be added, none renamed."""
    request, decode = found.request, found.decode
    return {
        "model": found.config.name,
        "architecture": found.config.architecture,
        "source": found.config.source,
        "origins": dict(found.config.origins),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "device": request.device,
        "kv_dtype": request.kv_dtype,
        "ssm_dtype": request.ssm_dtype,
        "kv_layout": request.kv_layout.value,
        "memory_layout": decode.layout,
        "pool": request.pool.value,
        "seed": request.seed,
        "tp": {"prefill": request.prefill_tp, "decode": request.decode_tp},
        "prefill_block_sizes": [group.block_size for group in found.prefill.groups],
        "bytes_per_block": decode.bytes_per_block,
        "groups": [_group_data(found, index) for index in range(len(found.groups))],
        "totals": {name: _amount_data(found.totals[name]) for name in PLANS},
        "refused": dict(found.reasons),
        "seconds": {name: _seconds(found, name) for name in PLANS},
        "bandwidth_bytes_per_second": request.bandwidth,
        "capacity": {
            "memory_bytes": request.memory_bytes,
            "request_tokens": request.prompt_tokens,
            "hma_tokens": found.capacity.decoding.tokens,
            "no_hma_tokens": found.full_capacity.decoding.tokens if found.full_capacity else None,
            "vllm_hma_tokens": found.capacity.admitted.tokens,
            "vllm_no_hma_tokens": found.full_capacity.admitted.tokens if found.full_capacity else None,
        },
        "notes": list(found.notes),
        "merging": list(reasons(found.case, found.plan.groups)),
    }


def _group_data(found: Inspection, index: int) -> dict[str, Any]:
    group, planned = found.groups[index], found.plan.groups[index]
    sizes = _page_sizes(group)
    return {
        "index": index,
        "kind": group.kind.name,
        "num_layers": len(group.layers),
        "layers": list(group.layers),
        "window": group.kind.window,
        "chunk": group.kind.chunk,
        "block_size": group.block_size,
        "page_bytes": max(sizes),
        "page_sizes": {str(size): count for size, count in sizes.items()},
        "live_tokens": [planned.live.start, planned.live.stop],
        "blocks_total": _blocks(found, group),
        "blocks_moved": _blocks_moved(found, index),
        **_amount_data(planned.amount, {}),
    }


def _amount_data(amount: Amount | None, missing: Any = None) -> Any:
    if amount is None:
        return missing
    return {"descriptors": amount.descriptors, "runs": amount.runs, "bytes": amount.num_bytes}


def _seconds(found: Inspection, name: str) -> float | None:
    amount = found.totals[name]
    return None if amount is None else found.seconds(amount)


def _page_sizes(group: GroupShape) -> dict[int, int]:
    """Page bytes to the number of layers that have them."""
    sizes: dict[int, int] = {}
    for size in group.page_bytes:
        sizes[size] = sizes.get(size, 0) + 1
    return sizes


def _blocks(found: Inspection, group: GroupShape) -> int:
    """Block positions that the prompt has in a group's table."""
    return -(-found.request.prompt_tokens // group.block_size)


def _blocks_moved(found: Inspection, index: int) -> int:
    """D's blocks that are written, whole or in part."""
    return len(set(found.plan.groups[index].pairs.local.tolist()))


def _groups(found: Inspection) -> Table:
    rows = []
    for index, group in enumerate(found.groups):
        planned, sizes = found.plan.groups[index], _page_sizes(group)
        rows.append(
            (
                index,
                group.kind.name,
                len(group.layers),
                _or_dash(group.kind.window if group.kind.window is not None else group.kind.chunk),
                group.block_size,
                " ".join(f"{size:,}" for size in sizes),
                _blocks(found, group),
                _blocks_moved(found, index),
                planned.amount.descriptors,
                planned.amount.runs,
                planned.amount.num_bytes,
            )
        )
    request = found.request
    cached = f", {request.cached_tokens:,} of them cached on D" if request.cached_tokens else ""
    return Table(
        title=f"{found.config.name}: {request.prompt_tokens:,} prompt tokens{cached}",
        columns=(
            "group",
            "kind",
            "layers",
            "window or chunk",
            "block",
            "page bytes",
            "blocks",
            "move",
            "descriptors",
            "runs",
            "bytes",
        ),
        rows=tuple(rows),
        optional=("page bytes", "layers", "blocks", "window or chunk"),
    )


def _plans(found: Inspection) -> Table:
    reference = found.totals["no_hma"]
    rows: list[tuple[object, ...]] = []
    for name in PLANS:
        amount = found.totals[name]
        if amount is None:
            rows.append((NAMES[name], "–", "–", "–", "–", "–"))
            continue
        share = f"{amount.num_bytes / reference.num_bytes:.1%}" if reference and reference.num_bytes else "–"
        cells = tuple(f"{number:,}" for number in (amount.descriptors, amount.runs, amount.num_bytes))
        rows.append((NAMES[name], *cells, share, f"{1000 * found.seconds(amount):,.2f} ms"))
    speed = f"{found.request.bandwidth / 1e9:g} GB/s"
    return Table(
        title="Four plans",
        columns=("plan", "descriptors", "runs", "bytes", "of all bytes", f"at {speed}"),
        rows=tuple(rows),
        right=("descriptors", "runs", "bytes", "of all bytes", f"at {speed}"),
        optional=(f"at {speed}", "runs"),
    )


def _capacity(found: Inspection) -> Table:
    def row(name: str, held: Held | None) -> tuple[object, ...]:
        if held is None:
            return (name, "–", "–", "–", "–")
        decoding = held.decoding
        figures = f"{decoding.num_blocks:,}", f"{decoding.concurrency:,.1f}", f"{decoding.tokens:,}"
        return (name, *figures, f"{held.admitted.tokens:,}")

    gib = found.request.memory_bytes / (1 << 30)
    columns = (
        "",
        "blocks",
        f"decoding requests of {found.request.prompt_tokens:,}",
        "tokens",
        "tokens by vLLM's count at start-up",
    )
    return Table(
        title=f"KV capacity of {gib:g} GiB a rank",
        columns=columns,
        rows=(row("with HMA", found.capacity), row("without HMA", found.full_capacity)),
        right=columns[1:],
    )


def _picture(found: Inspection) -> Picture:
    case, total = found.case, found.request.prompt_tokens
    bars = []
    for planned in found.plan.groups:
        cached = min(max(planned.live.start, case.cached_tokens), planned.live.stop)
        spans = [Span(start=0, stop=planned.live.start, style="dead")]
        spans.append(Span(start=planned.live.start, stop=cached, style="cached"))
        spans.append(Span(start=cached, stop=planned.live.stop, style="moves"))
        bars.append((f"{planned.index} {planned.kind.name}", tuple(span for span in spans if span.start < span.stop)))
    return Picture(
        title="The sequence, from its first token to its last",
        length=total,
        unit="tokens",
        bars=tuple(bars),
        styles=STYLES,
    )


def _records(found: Inspection) -> Iterator[Mapping[str, object]]:
    """One row a group, then one a plan; a plan's row leaves the group's columns empty."""
    columns = (
        "index",
        "kind",
        "num_layers",
        "window",
        "chunk",
        "block_size",
        "page_bytes",
        "blocks_total",
        "blocks_moved",
    )
    figures = ("descriptors", "runs", "bytes")
    for index in range(len(found.groups)):
        data = _group_data(found, index)
        yield {"model": found.config.name, "plan": "hma", **{key: data[key] for key in (*columns, *figures)}}
    for name in PLANS:
        data = _amount_data(found.totals[name], dict.fromkeys(figures, ""))
        yield {"model": found.config.name, "plan": f"{name} total", **dict.fromkeys(columns, ""), **data}


def _findings(found: Inspection) -> Iterator[Finding]:
    no_hma, in_tree, hma = (found.totals[name] for name in ("no_hma", "in_tree", "hma"))
    if hma is None or not hma.num_bytes:
        yield Finding(level="ok", text="Nothing moves: D computes the last prompt token and has what that reads.")
    else:
        if no_hma is not None and no_hma.num_bytes:
            share = hma.num_bytes / no_hma.num_bytes
            yield Finding(level="ok", text=f"hma moves {share:.1%} of what moves without HMA.")
        if in_tree is not None:
            times = in_tree.num_bytes / hma.num_bytes
            yield Finding(level="ok", text=f"The in-tree connector moves {times:.3f} times as much.")
    for name, reason in found.reasons.items():
        yield Finding(level="note", text=f"{NAMES[name]}: {reason}")
    for text in reasons(found.case, found.plan.groups):
        yield Finding(level="note", text=text)
    for text in found.notes:
        yield Finding(level="note", text=f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}")
    yield from _source(found)


def _source(found: Inspection) -> Iterator[Finding]:
    """Where the values came from: the file, and whatever it does not state."""
    elsewhere: dict[str, list[str]] = {}
    for path, origin in found.config.origins.items():
        if origin != "config.json":
            elsewhere.setdefault(origin, []).append(path)
    more = "; ".join(f"{', '.join(paths)}: {origin}" for origin, paths in elsewhere.items())
    unstated = f" Not stated there: {more}." if more else ""
    yield Finding(level="note", text=f"{found.config.name}: config.json from {found.config.source}.{unstated}")


def _or_dash(value: int | None) -> object:
    return "–" if value is None else f"{value:,}"


def _of(amount: Amount | None, key: str) -> object:
    return "–" if amount is None else f"{_number(amount, key):,}"


def _number(amount: Amount, key: str) -> int:
    return amount.num_bytes if key == "bytes" else getattr(amount, key)


def _ratio(one: Amount | None, other: Amount | None, key: str) -> str:
    return "–" if one is None or other is None else _times(_number(one, key), _number(other, key))


def _times(one: int, other: int) -> str:
    return f"{one / other:.2f}" if other else "–"
