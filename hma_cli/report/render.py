"""The one place that prints. Data goes to stdout, talk goes to stderr."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

from connector.errors import HmaError
from hma_cli.report.layout import fitted, is_right, printed
from hma_cli.report.result import Picture, Result, Span, Table

Format = Literal["table", "json", "csv"]

_MARKS = {"ok": "[green]✓[/]", "note": "[cyan]·[/]", "warning": "[yellow]![/]", "problem": "[red]✗[/]"}


def talk(message: str) -> None:
    """One line for people on stderr (Rich markup allowed)."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(message, soft_wrap=True)


def render(result: Result, fmt: Format = "table") -> None:
    """Print a result to stdout: versioned JSON, CSV of its records, or tables with their findings."""
    if fmt == "json":
        json.dump({"schema": result.schema, **result.data}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    if fmt == "csv":
        writer = csv.DictWriter(sys.stdout, fieldnames=list(result.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.records)
        return
    from rich.console import Console

    # Without a terminal Rich assumes 80 columns and cuts cells; files and pipes have room.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if result.text:
        console.out(result.text, highlight=False)
    for table in result.tables:
        console.print(_rich_table(table, console.width), crop=False)
    for picture in result.pictures:
        console.print(_drawn(picture, console.width), soft_wrap=True)
    for finding in result.findings:
        remedy = f" [dim]{_escape(finding.remedy)}[/]" if finding.remedy else ""
        console.print(f"{_MARKS[finding.level]} {_escape(finding.text)}{remedy}", soft_wrap=True)


def render_error(error: HmaError) -> None:
    """One sentence with both sides and the remedy, on stderr."""
    sides = "" if error.ours is None and error.theirs is None else f" (ours: {error.ours}, theirs: {error.theirs})"
    talk(f"[bold red]error[/] [dim]({error.code})[/] {_escape(error.message + sides)}")
    if error.remedy:
        talk(f"  {_escape(error.remedy)}")


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _rich_table(table: Table, width: int) -> Any:
    from rich import box
    from rich.table import Table as RichTable

    fit = fitted(table, width)
    hidden = f"Too narrow for: {', '.join(fit.left_out)}." if fit.left_out else ""
    rich = RichTable(
        title=table.title,
        caption=" ".join(filter(None, (table.note, hidden))) or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 0) if fit.narrow else (0, 1),
        width=fit.total,
    )
    for column, needed in zip(fit.columns, fit.widths, strict=True):
        justify: Literal["left", "right"] = "right" if is_right(table, column) else "left"
        rich.add_column(table.columns[column], justify=justify, width=needed)
    for row in table.rows:
        rich.add_row(*(_escape(printed(row[column])) for column in fit.columns))
    return rich


def _drawn(picture: Picture, width: int) -> str:
    """The picture as lines of Rich markup, no wider than `width` characters."""
    labels = max(len(label) for label, _ in picture.bars)
    cells = max(10, min(width - labels - 2, 100))
    lines = [f"[italic]{_escape(picture.title)}[/]"]
    for label, spans in picture.bars:
        names = _cells(spans, picture.length, cells, list(picture.styles))
        drawn = "".join(_stretch(picture, name, len(list(same))) for name, same in groupby(names))
        lines.append(f"{_escape(label):<{labels}}  {drawn}")
    return "\n".join([*lines, *_legend(picture, cells, labels + 2, width), ""])


def _legend(picture: Picture, cells: int, indent: int, width: int) -> Iterator[str]:
    """What the characters mean, in as many lines as it takes."""
    per_cell = picture.length / cells
    scale = f"one character: {f'{per_cell:,.0f}' if per_cell >= 10 else f'{per_cell:.2g}'} {picture.unit}"
    parts = [
        *((f"{mark} {text}", f"[{colour}]{mark}[/] {_escape(text)}") for mark, colour, text in picture.styles.values()),
        (scale, f"[dim]{_escape(scale)}[/]"),
    ]
    indent = min(indent, max(0, width - max(len(plain) for plain, _ in parts)))
    line, room = "", 0
    for plain, drawn in parts:
        if line and len(plain) + 3 <= room:
            line, room = f"{line}   {drawn}", room - len(plain) - 3
            continue
        if line:
            yield line
        line, room = " " * indent + drawn, width - indent - len(plain)
    yield line


def _stretch(picture: Picture, style: str, length: int) -> str:
    """Neighbouring characters of one style."""
    if not style:
        return " " * length
    mark, colour, _ = picture.styles[style]
    return f"[{colour}]{mark * length}[/]"


def _cells(spans: Sequence[Span], length: int, cells: int, ranking: Sequence[str]) -> Iterator[str]:
    """The style of each character: the most important of the spans that touch it, however short they are."""
    for cell in range(cells):
        start, stop = cell * length, (cell + 1) * length  # in units of 1 / cells
        touching = [span.style for span in spans if span.start * cells < stop and start < span.stop * cells]
        yield max(touching, key=ranking.index, default="")
