"""A directory is made once, whole or not at all, by one of the processes that want it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from connector.errors import ResourceError
from hma_cli.models.once import make_once


def fill(directory: Path, lock: int) -> None:
    assert lock >= 0
    (directory / "a").write_text("a")
    (directory / "b").write_text("b")


def once(target: Path, make=fill, **changes) -> None:  # type: ignore[no-untyped-def]
    settings = {"is_ready": target.exists, "on_wait": lambda: None, "deadline": 20.0} | changes
    make_once(target, make=make, **settings)


def listed(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_it_appears_complete_and_readable_by_others(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    once(target)
    assert listed(target) == {"a", "b"}
    assert target.stat().st_mode & 0o777 == 0o755
    assert (target / "a").stat().st_mode & 0o777 == 0o644
    assert listed(target.parent) == {"model", ".model.lock"}


def test_a_ready_directory_is_not_made_again(tmp_path: Path) -> None:
    target = tmp_path / "model"
    once(target)

    def never(directory: Path, lock: int) -> None:
        raise AssertionError(f"made again in {directory} under {lock}")

    once(target, make=never)


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_interrupted_making_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "model"

    def stop_half_way(directory: Path, lock: int) -> None:
        fill(directory, lock)
        raise error

    with pytest.raises(type(error)):
        once(target, make=stop_half_way)
    assert listed(tmp_path) == {".model.lock"}
    once(target)
    assert listed(target) == {"a", "b"}


def test_a_damaged_directory_stays_until_its_replacement_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("old")

    def look_and_fill(directory: Path, lock: int) -> None:
        assert listed(target) == {"old"}
        fill(directory, lock)

    once(target, make=look_and_fill, is_ready=lambda: False)
    assert listed(target) == {"a", "b"}


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "model"
    program = (
        "import os, sys; from pathlib import Path; from hma_cli.models.once import make_once\n"
        "def die(directory, lock): (directory / 'half').write_text('x'); os.kill(os.getpid(), 9)\n"
        "make_once(Path(sys.argv[1]), is_ready=lambda: False, make=die, on_wait=print, deadline=5)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(target)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(listed(tmp_path)) == 2
    once(target)
    assert listed(tmp_path) == {"model", ".model.lock"}


def _slowly_made(target: Path, log: Path) -> None:
    def make(directory: Path, lock: int) -> None:
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.5)
        fill(directory, lock)

    def on_wait() -> None:
        with log.open("a") as file:
            file.write("waited\n")

    once(target, make=make, on_wait=on_wait)
    assert listed(target) == {"a", "b"}


def test_four_processes_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    target, log = tmp_path / "cache" / "model", tmp_path / "log"
    processes = [context.Process(target=_slowly_made, args=(target, log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert log.read_text().count("made") == 1
    assert listed(target.parent) == {"model", ".model.lock"}


def test_a_child_that_outlives_its_parent_keeps_the_lock(tmp_path: Path) -> None:
    """The orphan still writes into the temporary directory, so nobody may clear it yet."""
    target = tmp_path / "model"
    program = (
        "import os, subprocess, sys; from pathlib import Path; from hma_cli.models.once import make_once\n"
        "def die(directory, lock):\n"
        "    child = subprocess.Popen(['sleep', '60'], pass_fds=(lock,)); print(child.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "make_once(Path(sys.argv[1]), is_ready=lambda: False, make=die, on_wait=print, deadline=5)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(target)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
    waited: list[bool] = []
    try:
        with pytest.raises(ResourceError, match="Another process has held"):
            once(target, on_wait=lambda: waited.append(True), deadline=0.5)
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert waited == [True]
    once(target)
    assert listed(target) == {"a", "b"}
