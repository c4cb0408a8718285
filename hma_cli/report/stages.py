"""Progress through named stages on stderr: a Rich bar on a terminal, one line a stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class StageBar:
    """A context manager. `stages` are shown in this order; with `shown` False nothing is written at all."""

    def __init__(self, title: str, stages: tuple[str, ...], *, shown: bool = True) -> None:
        self._title = title
        self._stages = stages
        self._shown = shown
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> StageBar:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[stage]}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
            self._task = self._bar.add_task(self._title, total=len(self._stages), stage="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def enter(self, stage: str, detail: str = "") -> None:
        """The stages before `stage` are done. ValueError for a name that was not announced."""
        done = self._stages.index(stage)
        text = f"{stage} ({detail})" if detail else stage
        if self._bar is not None:
            self._bar.update(self._task, completed=done, stage=text)
        elif self._shown:
            print(f"{self._title}: {text} ({done + 1}/{len(self._stages)})", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)
