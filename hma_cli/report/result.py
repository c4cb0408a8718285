"""What a command returns: data for machines, a view for people, an exit code.

Commands build a `Result` and return it. Only `hma_cli.report.render` prints it.
"""

from __future__ import annotations

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
    """A table for people: one title, the column heads, rows of cells (strings or numbers)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    note: str = ""


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
    tables, findings: the same facts for people.
    """

    schema: str
    data: dict[str, Any]
    tables: tuple[Table, ...] = ()
    findings: tuple[Finding, ...] = ()
    exit_code: Exit = Exit.OK
    text: str = field(default="")
