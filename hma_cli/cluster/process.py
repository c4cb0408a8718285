"""One supervised child: a guarded process with a log of its own, stopped gradually, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from connector.errors import ProcessError
from hma_cli.cluster import guard
from hma_cli.cluster.topology import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """Seconds that a child gets after INT before TERM follows, and after TERM before KILL. clear: what its descendants
    get after its end, and once more after TERM."""

    interrupt: float = 10.0
    terminate: float = 5.0
    clear: float = 3.0

    @property
    def total(self) -> float:
        """After that much a guard has finished, whatever its command does (see guard.Guard)."""
        return self.interrupt + self.terminate + 3 * self.clear + 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended: an exit code, or the signal that ended it; neither when its guard was killed."""

    code: int | None = None
    signal: int | None = None

    @property
    def text(self) -> str:
        """For a sentence: `ended with exit code 1`, `was ended by SIGKILL`."""
        if self.signal is not None:
            try:
                return f"was ended by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"was ended by signal {self.signal}"
        return "was lost" if self.code is None else f"ended with exit code {self.code}"


class Child:
    """A guarded process. `on_exit(name, status)` is called once, from a thread, when the command itself has ended."""

    def __init__(
        self,
        name: str,
        argv: tuple[str, ...],
        env: Environment,
        *,
        log: Path,
        on_exit: Callable[[str, ExitStatus], None],
        grace: Grace | None = None,
    ) -> None:
        self.name, self.log = name, log
        self._argv, self._env, self._on_exit, self._grace = argv, env, on_exit, grace or Grace()
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._started = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """The command's own process id. ProcessError when it never started."""
        if self._pid is None:
            raise ProcessError(f"{self.name} did not start.", remedy=f"See {self.log}.")
        return self._pid

    def start(self, timeout: float = 20.0) -> None:
        """Start the guard and the command. Returns once the command has a process id, or could not be started
        (`on_exit` tells that). ProcessError when the guard itself does not come up."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        grace = [str(seconds) for seconds in (self._grace.interrupt, self._grace.terminate, self._grace.clear)]
        # -P: the guard's own directory must not shadow the standard library.
        command = [sys.executable, "-P", str(Path(guard.__file__)), "--log", str(self.log), "--grace", *grace, "--"]
        with open(self.log, "ab") as log:
            self._guard = subprocess.Popen(
                [*command, *self._argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_merged(self._env),
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher only, which then stops in order
            )
        self._reader = threading.Thread(target=self._read, args=(self._guard,), name=f"{self.name}-status", daemon=True)
        self._reader.start()
        if not self._started.wait(timeout):
            self.stop()
            self.wait()
            raise ProcessError(f"{self.name} was not started within {timeout:g} s.", remedy=f"See {self.log}.")

    def stop(self) -> None:
        """Order the stop; returns at once. May be called twice, and before start."""
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def wait(self) -> None:
        """Wait until nothing of the child is alive; a guard that overstays its time is killed with its session."""
        if self._guard is None:
            return
        try:
            self._guard.wait(self._grace.total)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        _end_session(self._guard.pid)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=5)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        status = ExitStatus()
        if process.stdout is None:
            return
        with process.stdout as stream:
            for line in stream:
                fact, _, number = line.decode().strip().partition(" ")
                if fact == "pid":
                    self._pid = int(number)
                    self._started.set()
                elif fact in ("exit", "signal"):
                    status = ExitStatus(code=int(number)) if fact == "exit" else ExitStatus(signal=int(number))
                    break
        self._started.set()
        self._on_exit(self.name, status)


def stop_all(children: list[Child]) -> None:
    """Stop children side by side and wait for all of them. Bounded by their grace."""
    for child in children:
        child.stop()
    for child in children:
        child.wait()


def tail(path: Path, lines: int = 20, limit: int = 1 << 16) -> tuple[str, ...]:
    """The last lines of a log, without empty ones."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, path.stat().st_size - limit))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line for line in text.splitlines() if line.strip())[-lines:]


def _merged(changes: Environment) -> dict[str, str]:
    env = dict(os.environ)
    for name, value in changes:
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def _end_session(session: int, timeout: float = 5.0) -> None:
    """Kill what is left in a guard's session. Only needed after a guard was killed: it clears everything itself."""
    deadline = time.monotonic() + timeout
    while (left := _session_members(session)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _session_members(session: int) -> list[int]:
    members = []
    for pid in guard.all_pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session and guard.parent_of(pid) is not None:
                members.append(pid)
    return members
