"""The one place that prints. Data goes to stdout, talk goes to stderr."""

from __future__ import annotations

import json
import sys
from typing import Literal

from connector.errors import HmaError
from hma_cli.report.result import Result, Table

Format = Literal["table", "json"]

_MARKS = {"ok": "[green]✓[/]", "note": "[cyan]·[/]", "warning": "[yellow]![/]", "problem": "[red]✗[/]"}


def talk(message: str) -> None:
    """One line for people on stderr (Rich markup allowed)."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(message, soft_wrap=True)


def render(result: Result, fmt: Format = "table") -> None:
    """Print a result to stdout: versioned JSON, or tables with their findings."""
    if fmt == "json":
        json.dump({"schema": result.schema, **result.data}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    from rich.console import Console

    # Without a terminal Rich assumes 80 columns and cuts cells; files and pipes have room.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if result.text:
        console.out(result.text, highlight=False)
    for table in result.tables:
        console.print(_rich_table(table))
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


def _rich_table(table: Table):  # type: ignore[no-untyped-def]
    from rich import box
    from rich.table import Table as RichTable

    rich = RichTable(title=table.title, caption=table.note or None, box=box.SIMPLE_HEAD, title_justify="left")
    numeric = [
        bool(table.rows) and all(isinstance(row[i], int | float) for row in table.rows)
        for i in range(len(table.columns))
    ]
    for name, is_number in zip(table.columns, numeric, strict=True):
        rich.add_column(name, justify="right" if is_number else "left")
    for row in table.rows:
        rich.add_row(*(f"{cell:,}" if isinstance(cell, int) else _escape(str(cell)) for cell in row))
    return rich
