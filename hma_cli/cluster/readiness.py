"""How far a starting server is: its stage from its log and health check, and the lines that show it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

HEALTH_PERIOD = 1.0  # seconds


class Stage(IntEnum):
    """Steps of a start, in order."""

    WAITING = 0
    STARTING = 1
    CONFIGURING = 2
    ENGINE = 3
    LOADING = 4
    WARMING = 5
    KV_CACHE = 6
    CONNECTOR = 7
    SERVING = 8
    READY = 9
    ENDED = 10

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Stage.WAITING: "waiting",
    Stage.STARTING: "starting Python and vLLM",
    Stage.CONFIGURING: "reading the model's configuration",
    Stage.ENGINE: "starting the engine",
    Stage.LOADING: "loading weights",
    Stage.WARMING: "compiling and warming up",
    Stage.KV_CACHE: "allocating the KV cache",
    Stage.CONNECTOR: "registering KV memory",
    Stage.SERVING: "starting the API server",
    Stage.READY: "ready",
    Stage.ENDED: "ended",
}

# Phrases of vLLM 0.32's log. One that is missing in another version costs a stage in the view, nothing else.
_PATTERNS = (
    (re.compile(r"Application startup|Starting vLLM server|Supported tasks|init engine .* took"), Stage.SERVING),
    (re.compile(r"Registering KV|Initializing NIXL|Initialized NIXL agent|HmaNixlConnector"), Stage.CONNECTOR),
    (re.compile(r"KV cache size:|for KV cache on node|Available KV cache memory"), Stage.KV_CACHE),
    (re.compile(r"Warming up model|Capturing CUDA graph"), Stage.WARMING),
    (re.compile(r"Starting to load model|Loading safetensors|Loading weights"), Stage.LOADING),
    (re.compile(r"Initializing a V1 LLM engine"), Stage.ENGINE),
    (re.compile(r"non-default args|Resolved architecture"), Stage.CONFIGURING),
)
_CLUTTER = re.compile(
    r"^(\((?P<process>\w+) pid=\d+\) )?((INFO|WARNING|ERROR|DEBUG) )?(\d\d-\d\d \d\d:\d\d:\d\d )?(\[[\w.]+:\d+\] ?)?"
)


def stage_of(line: str) -> Stage | None:
    """The stage that a log line of vLLM tells of.

    >>> stage_of("(Worker pid=7) INFO 12-01 05:37:37 [cpu_model_runner.py:68] Starting to load model x...").text
    'loading weights'
    """
    # The engine's settings are logged in one line that mentions nearly every word.
    if "non-default args" in line:
        return Stage.CONFIGURING
    if "Initializing a V1 LLM engine" in line:
        return Stage.ENGINE
    return next((stage for pattern, stage in _PATTERNS if pattern.search(line)), None)


def plain(line: str) -> str:
    """A log line without the process, level, time and source that vLLM puts in front.

    >>> plain("(Worker pid=7) INFO 12-01 05:37:37 [loader.py:68] Loading weights took 0.01 seconds")
    'Loading weights took 0.01 seconds'
    """
    return _CLUTTER.sub("", line, count=1).strip()


class LogFollower:
    """Reads what has been added to a log since the last time; a partial last line waits."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, ""

    def new_lines(self) -> tuple[str, ...]:
        """Complete lines, without empty ones; nothing while the file does not exist."""
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read(1 << 20)
        except OSError:
            return ()
        self._offset += len(data)
        # Progress bars rewrite their line with carriage returns.
        *lines, self._rest = (self._rest + data.decode(errors="replace")).replace("\r", "\n").split("\n")
        return tuple(line for line in lines if line.strip())


class Watcher:
    """Follows one starting child from a thread: `on_line` for every new log line, `on_healthy` once, then it ends."""

    def __init__(
        self, *, name: str, url: str, log: Path, on_line: Callable[[str], None], on_healthy: Callable[[], None]
    ) -> None:
        self._url, self._follower = url, LogFollower(log)
        self._on_line, self._on_healthy = on_line, on_healthy
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the thread ends within a health check's timeout, and tells nothing after that."""
        self._over.set()

    def _run(self) -> None:
        import httpx

        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while not self._over.wait(HEALTH_PERIOD):
                for line in self._follower.new_lines():
                    self._on_line(line)
                if self._over.is_set():
                    return
                try:
                    healthy = client.get(f"{self._url}/health").status_code == 200
                except httpx.HTTPError:
                    continue
                if healthy and not self._over.is_set():
                    self._on_healthy()
                    return
