"""What a command returns: data for machines, a view for people, an exit code.

Commands build a `Result` and return it. Only `hma_cli.report.render` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    CHECK_FAILED = 1
    TOOL_FAILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table for people: one title, the column heads, rows of cells (strings or numbers).

    right: columns set to the right though their cells are strings; those of numbers are anyway. optional: columns that
    are left out, in this order, where the terminal is too narrow for all.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    note: str = ""
    right: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a bar, `start` up to `stop`, in a named style of the picture."""

    start: int
    stop: int
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Bars of one length, drawn as wide as the terminal allows.

    length: what a bar stands for, in `unit`. bars: (label, spans). styles: name to (character, Rich colour, meaning),
    from the least to the most important: where several fall on one character, the last one is drawn.
    """

    title: str
    length: int
    unit: str
    bars: tuple[tuple[str, tuple[Span, ...]], ...]
    styles: Mapping[str, tuple[str, str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing the reader should know. `problem` findings go with a nonzero exit code."""

    level: Literal["ok", "note", "warning", "problem"]
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A command's outcome.

    schema: name and version of `data`, for example `hma.launch/1`; keys may be added, none renamed.
    data:   JSON-ready values only.
    tables, pictures, findings: the same facts for people. records: rows for `--format csv`, all with the same keys.
    """

    schema: str
    data: dict[str, Any]
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    records: tuple[Mapping[str, object], ...] = ()
    findings: tuple[Finding, ...] = ()
    exit_code: Exit = Exit.OK
    text: str = field(default="")
