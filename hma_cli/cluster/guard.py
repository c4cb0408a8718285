"""The process between the launcher and one server: whatever happens to either, nothing of the server stays behind.

Run as a script, with the command after `--`. The launcher holds the other end of standard input; the guard stops the
command when that end closes, so a launcher that was killed stops its servers just as one that asks. The guard is a
*child subreaper*: a descendant whose parent died becomes the guard's child, so none can escape by forking or by a
session of its own. Standard output carries one line per fact: `pid N`, then `exit N` or `signal N`.

Only the standard library is imported: there is one guard for each server, and it lives as long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

SHARED_MEMORY = Path("/dev/shm")
_STOP_STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SharedMemory:
    """Which files in /dev/shm this guard's descendants have opened, by inode; removes those that outlive all users.

    Python's and UCX's segments have names but no owner that survives SIGKILL. A file goes only when a descendant was
    seen holding it, it still is the same inode, and no living process holds it (the other server may).
    """

    def __init__(self, root: Path = SHARED_MEMORY) -> None:
        self._root = root
        self._seen: dict[tuple[int, int], Path] = {}

    def sample(self, pids: list[int]) -> None:
        """Remember what these processes hold now."""
        for pid in pids:
            for path in held_files(pid, self._root):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    self._seen[(stat.st_dev, stat.st_ino)] = path

    def sweep(self) -> list[Path]:
        """Remove what nobody holds any more. Returns the removed paths."""
        held = {path for pid in all_pids() for path in held_files(pid, self._root)}
        removed = []
        for identity, path in self._seen.items():
            with contextlib.suppress(OSError):
                stat = path.stat()
                if (stat.st_dev, stat.st_ino) == identity and path not in held:
                    path.unlink()
                    removed.append(path)
        return removed


def held_files(pid: int, root: Path) -> set[Path]:
    """Files below `root` that a process has open or mapped; empty for a process that is gone or not ours."""
    found: set[Path] = set()
    prefix = f"{root}/"
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            name = line.rstrip("\n").partition(prefix)[2]
            if name and not name.endswith(" (deleted)"):
                found.add(root / name)
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith(prefix) and not target.endswith(" (deleted)"):
                    found.add(Path(target))
    return found


def all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def parent_of(pid: int) -> int | None:
    """The parent of a living process; None for one that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything; fields are counted from its last closing parenthesis.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return None if state in "ZX" else int(parent)


def descendants(of: int) -> list[int]:
    """All living descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        if (parent := parent_of(pid)) is not None:
            children.setdefault(parent, []).append(pid)
    found, open_ends = [], [of]
    while open_ends:
        mine = children.get(open_ends.pop(), [])
        found += mine
        open_ends += mine
    return found


class Guard:
    """Runs one command. `grace`: seconds between INT and TERM, between TERM and KILL, and what is left of the command's
    family gets to end by itself, and again after TERM."""

    def __init__(self, command: list[str], *, log: str, grace: tuple[float, float, float]) -> None:
        self._command, self._log, self._grace = command, log, grace
        self._shared = SharedMemory()
        self._main = 0
        self._status: int | None = None
        self._started = time.monotonic()

    def run(self) -> int:
        """Start the command, wait for its end or for the order to stop, leave nothing. Returns the exit code."""
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wakeups = _signal_pipe()
        try:
            self._main = self._spawn()
        except OSError as error:
            self._note(f"cannot start {self._command[0]}: {error.strerror}")
            _tell("exit 127")
            return 127
        _tell(f"pid {self._main}")
        self._watch(wakeups)
        self._shared.sample(descendants(os.getpid()))
        if self._status is None:
            self._stop()
        if self._status is not None:
            _tell(f"exit {self._status}" if self._status >= 0 else f"signal {-self._status}")
        self._clear()
        for path in self._shared.sweep():
            self._note(f"removed {path}, left behind by the server")
        return max(0, self._status or 0)

    def _spawn(self) -> int:
        def prepare() -> None:
            # Should the guard itself be killed, its server must not run on unwatched.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        with open(self._log, "ab", buffering=0) as log:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=prepare,
            )
        return child.pid

    def _watch(self, wakeups: int) -> None:
        """Wait until the command has ended by itself, or for the order to stop: end of input or a signal."""
        while self._status is None:
            # Servers make their shared memory while they start: look often then, and seldom later, for an idle pair
            # is to be quiet.
            pause = min(30.0, max(2.0, (time.monotonic() - self._started) / 4))
            ready, _, _ = select.select([0, wakeups], [], [], pause)
            if not ready:
                self._shared.sample(descendants(os.getpid()))
            if wakeups in ready:
                signals = os.read(wakeups, 4096)
                self._reap()
                if any(number in _STOP_SIGNALS for number in signals):
                    return
            if 0 in ready and not os.read(0, 4096):
                return

    def _stop(self) -> None:
        """INT, TERM, KILL to the command's process group, each with its patience."""
        for number, patience in zip(_STOP_STEPS, (*self._grace[:2], 10.0), strict=True):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._main, number)
            if self._wait(patience, lambda: self._status is not None):
                return

    def _clear(self) -> None:
        """End every descendant that is left, wherever it moved: TERM, then KILL."""
        for number in (signal.SIGTERM, signal.SIGKILL, None):
            if self._wait(self._grace[2], lambda: not descendants(os.getpid())) or number is None:
                return
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            self._reap()
            if done():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def _reap(self) -> None:
        """Collect dead children; keep the command's status (negative: the signal that ended it)."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if found[0] == self._main:
                    self._status = os.waitstatus_to_exitcode(found[1])

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError), open(self._log, "a") as log:
            log.write(f"[hma guard] {text}\n")


def _signal_pipe() -> int:
    """A descriptor that becomes readable, with the signals' numbers, when a child ends or somebody says stop."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGCHLD, *_STOP_SIGNALS):
        signal.signal(number, lambda *_: None)
    return reading


def _tell(line: str) -> None:
    # A launcher that was killed reads no more; the work goes on.
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


def main() -> int:
    """Entry point of the guard process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    parser.add_argument("--grace", type=float, nargs=3, required=True)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return Guard(arguments.command, log=arguments.log, grace=tuple(arguments.grace)).run()


if __name__ == "__main__":
    sys.exit(main())
