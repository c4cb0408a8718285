"""A view of things in progress on stderr: a table that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing in progress: its name, its stage, seconds in that stage, and its newest line of output."""

    name: str
    stage: str
    seconds: float
    line: str = ""


class LiveView:
    """Shows rows until it is closed. A context manager; `update` may be called at any rate."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live: Any = None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> LiveView:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, rows: tuple[Row, ...]) -> None:
        """Show the newest state. Without a terminal a row is told again only when its stage has changed."""
        if self._live is not None:
            self._live.update(_table(self._title, rows))
        for row in rows:
            if self._shown.get(row.name) != row.stage:
                self._shown[row.name] = row.stage
                if self._live is None:
                    print(f"{row.name}: {row.stage}", file=sys.stderr, flush=True)


def _table(title: str, rows: tuple[Row, ...]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("process", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
    for row in rows:
        table.add_row(row.name, row.stage, f"{row.seconds:.0f}", Text(row.line))
    return table
