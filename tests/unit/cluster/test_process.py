"""Guarded children with real tiny processes: graded stop, escaped descendants, a killed launcher, shared memory."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hma_cli.cluster import guard
from hma_cli.cluster.process import Child, ExitStatus, Grace, stop_all, tail

QUICK = Grace(interrupt=0.5, terminate=0.5, clear=0.5)


def alive(pid: int) -> bool:
    return guard.parent_of(pid) is not None


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Started:
    """A child that runs a Python program, with its exits in a queue."""

    def __init__(self, directory: Path, program: str, grace: Grace) -> None:
        self.exits: queue.Queue[ExitStatus] = queue.Queue()
        self.log = directory / f"{time.monotonic_ns()}.log"
        self.child = Child(
            "child",
            (sys.executable, "-u", "-c", textwrap.dedent(program)),
            (("HMA_TEST_VALUE", "7"), ("PYTHONPATH", None)),
            log=self.log,
            on_exit=lambda _name, status: self.exits.put(status),
            grace=grace,
        )
        self.child.start()

    def said(self, word: str) -> int:
        """Wait for a line `word N` in the log and return N."""
        assert until(lambda: any(line.startswith(f"{word} ") and line.split()[1:] for line in tail(self.log))), tail(
            self.log
        )
        return int(next(line for line in tail(self.log) if line.startswith(f"{word} ")).split()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    running: list[Started] = []

    def begin(program: str, grace: Grace = QUICK) -> Started:
        running.append(Started(tmp_path, program, grace))
        return running[-1]

    yield begin
    stop_all([started.child for started in running])


SLEEPER = "import time; print('up 1'); time.sleep(600)"
STUBBORN = """
    import signal, time
    for number in ({signals}):
        signal.signal(number, signal.SIG_IGN)
    print("up 1")
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("ignored", "expected"),
    [
        ("", signal.SIGINT),
        ("signal.SIGINT,", signal.SIGTERM),
        ("signal.SIGINT, signal.SIGTERM", signal.SIGKILL),
    ],
)
def test_a_stop_grows_from_int_over_term_to_kill(start, ignored: str, expected: int) -> None:  # type: ignore[no-untyped-def]
    started = start(STUBBORN.format(signals=ignored))
    started.said("up")
    started.child.stop()
    started.child.wait()
    status = started.exits.get(timeout=5)
    # Python turns an unhandled SIGINT into an exit that says so.
    assert status.signal == expected or (expected == signal.SIGINT and status.code is not None)
    assert not alive(started.child.pid)


def test_an_exit_is_told_with_its_code_and_leaves_its_log(start) -> None:  # type: ignore[no-untyped-def]
    started = start("import os, sys; print('value', os.environ['HMA_TEST_VALUE']); sys.exit(3)")
    status = started.exits.get(timeout=10)
    assert status == ExitStatus(code=3)
    assert status.text == "ended with exit code 3"
    assert "value 7" in tail(started.log)


def test_a_killed_command_is_told_with_its_signal(start) -> None:  # type: ignore[no-untyped-def]
    started = start(SLEEPER)
    os.kill(started.child.pid, signal.SIGKILL)
    status = started.exits.get(timeout=10)
    assert status.text == "was ended by SIGKILL"


def test_a_command_that_does_not_exist_is_an_exit(tmp_path: Path) -> None:
    exits: queue.Queue[ExitStatus] = queue.Queue()
    child = Child(
        "x", ("/no/such/program",), (), log=tmp_path / "x.log", on_exit=lambda _name, status: exits.put(status)
    )
    child.start()
    assert exits.get(timeout=10) == ExitStatus(code=127)
    child.wait()
    assert "cannot start /no/such/program" in (tmp_path / "x.log").read_text()


ESCAPED = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("escaped", os.getpid())
time.sleep(600)
"""
MIDDLE = """
import subprocess, sys
subprocess.Popen([sys.executable, "-u", "-c", sys.argv[1]], start_new_session=True)
"""
FAMILY = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-u", "-c", {MIDDLE!r}, {ESCAPED!r}])
print("up 1")
"""


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(1)"])
def test_a_descendant_that_left_group_session_and_parent_is_ended_too(  # type: ignore[no-untyped-def]
    start, then: str
) -> None:
    started = start(FAMILY + then)
    escaped = started.said("escaped")
    assert alive(escaped)
    started.child.stop()
    started.child.wait()
    assert not alive(escaped)


def test_a_killed_guard_takes_its_command_along(start) -> None:  # type: ignore[no-untyped-def]
    started = start(SLEEPER)
    started.said("up")
    guard_pid = guard.parent_of(started.child.pid)
    assert guard_pid is not None
    os.kill(guard_pid, signal.SIGKILL)
    assert started.exits.get(timeout=10).text == "was lost"
    assert until(lambda: not alive(started.child.pid))
    started.child.wait()


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
        import sys, time
        from pathlib import Path
        from hma_cli.cluster.process import Child, Grace
        stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
        child = Child("c", (sys.executable, "-c", stubborn), (), log=Path({str(tmp_path / "c.log")!r}),
                      on_exit=lambda *_: None, grace=Grace(interrupt=0.3, terminate=0.3))
        child.start()
        print(child.pid, flush=True)
        time.sleep(600)
    """
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    watcher = guard.parent_of(server)
    assert watcher is not None
    assert alive(server)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert until(lambda: not alive(server) and not alive(watcher))


def test_shared_memory_of_a_killed_command_is_removed_and_others_stay(start) -> None:  # type: ignore[no-untyped-def]
    foreign = guard.SHARED_MEMORY / f"hma-test-foreign-{os.getpid()}"
    mine = guard.SHARED_MEMORY / f"hma-test-mine-{os.getpid()}"
    foreign.write_bytes(b"x" * 4096)
    try:
        started = start(
            f"""
            import mmap, os, time
            descriptor = os.open({str(mine)!r}, os.O_CREAT | os.O_RDWR)
            os.ftruncate(descriptor, 4096)
            memory = mmap.mmap(descriptor, 4096)
            os.close(descriptor)
            print("up 1")
            time.sleep(600)
            """
        )
        started.said("up")
        started.child.stop()
        started.child.wait()
        assert foreign.exists()
        assert not mine.exists()
        assert any("left behind" in line for line in tail(started.log))
    finally:
        for path in (foreign, mine):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def test_shared_memory_that_somebody_else_still_holds_stays(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"x")
    shared = guard.SharedMemory(tmp_path)
    with open(path, "rb"):
        shared.sample([os.getpid()])
        assert shared.sweep() == []
    assert shared.sweep() == [path]
    assert not path.exists()


def test_a_file_of_the_same_name_but_another_inode_stays(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"x")
    shared = guard.SharedMemory(tmp_path)
    with open(path, "rb"):
        shared.sample([os.getpid()])
        (tmp_path / "other").write_bytes(b"y")
        os.replace(tmp_path / "other", path)
    assert shared.sweep() == []
    assert path.exists()


def test_stopping_twice_or_never_started_is_fine(tmp_path: Path) -> None:
    child = Child("x", ("true",), (), log=tmp_path / "x.log", on_exit=lambda *_: None)
    child.stop()
    child.wait()
    child.start()
    child.stop()
    child.stop()
    child.wait()


def test_tail_gives_the_last_lines_without_empty_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n\n".join(f"line {i}" for i in range(100)))
    assert tail(log, 2) == ("line 98", "line 99")
    assert tail(tmp_path / "none") == ()
