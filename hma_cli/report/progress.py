"""Progress of counted work on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SILENCE = 15.0  # seconds between two lines where there is no terminal


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call once for each finished item."""
    with (_bar if sys.stderr.isatty() else _lines)(title, total) as advance:
        yield advance


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    # sys.stderr is taken now: others may redirect it while the work goes on.
    console = Console(file=sys.stderr, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _lines(title: str, total: int) -> Iterator[Callable[[], None]]:
    stream = sys.stderr
    started = told = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, told
        done += 1
        now = time.monotonic()
        if done == total or now - told >= _SILENCE:
            told = now
            left = (now - started) / done * (total - done)
            print(f"{title}: {done}/{total}, {left:.0f} s left", file=stream, flush=True)

    yield advance
