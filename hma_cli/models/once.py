"""Directories that are made once, whole or not at all, however many processes want them at the same time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from connector.errors import ResourceError

_POLL_SECONDS = 0.2


def make_once(
    target: Path,
    *,
    is_ready: Callable[[], bool],
    make: Callable[[Path, int], None],
    on_wait: Callable[[], None],
    deadline: float,
) -> None:
    """Let `make` fill a temporary directory beside `target`, then rename it to `target` in one step.

    One process at a time: the others wait up to `deadline` seconds (ResourceError after that; `on_wait` is called once)
    and find the directory ready. `make` gets the temporary directory and the lock's file descriptor: a child process
    that inherits it keeps the lock, so nobody takes its directory for a dead run's. Whatever `make` raises leaves
    neither the temporary directory nor a partial target. OSError where the file system refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock", on_wait=on_wait, deadline=deadline) as lock:
        if is_ready():
            return
        prefix = f".{target.name}.tmp-"
        for leftover in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a run that was killed: whoever holds the lock is alone
        fresh = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            make(fresh, lock)
            _open_to_readers(fresh)
            if target.exists():
                shutil.rmtree(target)  # there, but not ready: damaged
            fresh.rename(target)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise


def _open_to_readers(directory: Path) -> None:
    """mkdtemp and safetensors write for their owner only; a cache may be shared."""
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)


@contextmanager
def _locked(path: Path, *, on_wait: Callable[[], None], deadline: float) -> Iterator[int]:
    """Hold an exclusive flock on `path`. The file stays: removing it would let two processes lock two files."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = time.monotonic() + deadline
        told = False
        while not _try_lock(descriptor):
            if time.monotonic() > end:
                raise ResourceError(
                    f"Another process has held {path} for {deadline:.0f} seconds.",
                    remedy=f"See who it is with `fuser {path}`, end it, and try again.",
                )
            if not told:
                on_wait()
                told = True
            time.sleep(_POLL_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
