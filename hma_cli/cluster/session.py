"""The shell around the supervisor: starts children, feeds events to the reducer and carries out its effects.

One thread (the caller's) owns the state. Exit watchers, log followers and the probe run in threads that only put events
into a queue. `close` is the only way out, and it may be called at any point.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from connector.errors import HmaError, ProcessError
from hma_cli.cluster.diagnosis import diagnose
from hma_cli.cluster.ports import Ports
from hma_cli.cluster.process import Child, ExitStatus, Grace, stop_all, tail
from hma_cli.cluster.proof import Probe, prove
from hma_cli.cluster.readiness import Watcher, plain
from hma_cli.cluster.supervisor import (
    ChildState,
    Died,
    Effect,
    Event,
    Exited,
    Healthy,
    Interrupted,
    LaunchState,
    Output,
    ProbeFailed,
    ProbePassed,
    Started,
    Tick,
    TimedOut,
    reduce,
)
from hma_cli.cluster.topology import Router, Server, Topology

_TICK = 0.5  # seconds between looks at the deadline, and between updates of the view
_SHOWN_LINES = 20
_READ_LINES = 400


class LaunchFailed(ProcessError):
    """A launch that ended before it was ready, or a child that died later. `lines`: the end of the culprit's log."""

    def __init__(self, message: str, *, remedy: str = "", lines: tuple[str, ...] = (), name: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.lines, self.name = lines, name


class LaunchInterrupted(ProcessError):
    """Ctrl-C or a signal before the pair was ready."""

    code = "interrupted"


class Session:
    """One running topology. `on_change(state)` is called on the caller's thread at each change and twice a second."""

    def __init__(
        self,
        topology: Topology,
        *,
        ports: Ports,
        log_dir: Path,
        ready_timeout: float,
        require_hma: bool,
        on_change: Callable[[LaunchState], None] | None = None,
        grace: Grace | None = None,
    ) -> None:
        self.topology, self.log_dir = topology, log_dir
        self._ports, self._require_hma = ports, require_hma
        self._on_change = on_change or (lambda _state: None)
        self._grace = grace or Grace()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, Watcher] = {}
        self._probe: Probe | None = None
        self._probe_error: HmaError | None = None
        self._closed = False
        names = [ChildState(name=server.name) for server in topology.servers]
        if topology.router is not None:
            names.append(ChildState(name=topology.router.name, router=True))
        self.state = LaunchState(children=tuple(names), deadline=time.monotonic() + ready_timeout)
        self._timeout = ready_timeout

    @property
    def probe(self) -> Probe | None:
        """The proof, once the pair is ready; None for a plain engine."""
        return self._probe

    def pid(self, name: str) -> int:
        """A child's process id."""
        return self._children[name].pid

    def log(self, name: str) -> Path:
        """A child's log."""
        return self.log_dir / f"{name}.log"

    def interrupt(self) -> None:
        """Ask for the end, from a signal handler or another thread."""
        self._events.put(Interrupted(at=time.monotonic()))

    def run_until_ready(self) -> None:
        """Start everything. LaunchFailed, LaunchInterrupted or the proof's error otherwise; all is stopped then."""
        try:
            for server in self.topology.servers:
                self._start(server)
            self._loop(lambda: self.state.phase in ("ready", "stopping"))
            if self.state.phase == "stopping":
                raise self._failure()
        except BaseException:
            self.close()
            raise

    def run_until_ended(self) -> None:
        """Wait for an interrupt, which is a good end. LaunchFailed when a child dies. All is stopped afterwards."""
        try:
            self._loop(lambda: self.state.phase == "stopping")
            if self.state.reason != "interrupted":
                raise self._failure()
        finally:
            self.close()

    def close(self) -> None:
        """Stop all children and wait until nothing is left. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for watcher in self._watchers.values():
            watcher.stop()
        stop_all(list(self._children.values()))
        self._drain()
        self._on_change(self.state)

    def _loop(self, done: Callable[[], bool]) -> None:
        while not done():
            try:
                event = self._events.get(timeout=_TICK)
            except queue.Empty:
                event = Tick(at=time.monotonic())
            self._feed(event)
            self._feed(Tick(at=time.monotonic()))
            self._on_change(self.state)

    def _feed(self, event: Event) -> None:
        self.state, effects = reduce(self.state, event)
        for effect in effects:
            self._carry_out(effect)

    def _drain(self) -> None:
        """Take note of the children that ended while stopping."""
        while not self._events.empty():
            self.state, _ = reduce(self.state, self._events.get())

    def _carry_out(self, effect: Effect) -> None:
        if effect == "start_router" and self.topology.router is not None:
            self._start(self.topology.router)
        elif effect == "run_probe":
            threading.Thread(target=self._run_probe, name="probe", daemon=True).start()
        # "announce" and "stop_all" end the loop: the caller goes on from there.

    def _start(self, process: Server | Router) -> None:
        second_port = process.prometheus_port if isinstance(process, Router) else process.control_port
        child = Child(
            process.name,
            process.argv,
            process.env,
            log=self.log(process.name),
            on_exit=self._exited,
            grace=self._grace,
        )
        self._children[process.name] = child
        self._ports.release(process.http_port, second_port)
        child.start()
        self._feed(Started(name=process.name, at=time.monotonic()))
        watcher = Watcher(
            name=process.name,
            url=process.url,
            log=child.log,
            on_line=lambda line: self._events.put(Output(name=process.name, line=line, at=time.monotonic())),
            on_healthy=lambda: self._events.put(Healthy(name=process.name, at=time.monotonic())),
        )
        self._watchers[process.name] = watcher
        watcher.start()

    def _exited(self, name: str, status: ExitStatus) -> None:
        self._events.put(Exited(name=name, status=status, at=time.monotonic()))

    def _run_probe(self) -> None:
        try:
            self._probe = prove(self.topology, require_hma=self._require_hma)
        except HmaError as error:
            self._probe_error = error
        except Exception as error:
            self._probe_error = ProcessError(f"The probe failed: {type(error).__name__}: {error}.")
        passed = self._probe is not None
        at = time.monotonic()
        self._events.put(ProbePassed(at=at) if passed else ProbeFailed(at=at))

    def _failure(self) -> HmaError:
        """The error that tells why the launch stops."""
        reason = self.state.reason
        if reason == "interrupted":
            return LaunchInterrupted("Stopped before the servers were ready.")
        if reason == "unproven" and self._probe_error is not None:
            return self._probe_error
        if isinstance(reason, Died) and reason.phase == "ready":
            return self._explained(reason.name, f"{reason.name} {reason.status.text} while it ran.", diagnosed=False)
        if isinstance(reason, Died):
            return self._explained(reason.name, f"{reason.name} {reason.status.text} before the launch was ready.")
        if isinstance(reason, TimedOut):
            what = f"{' and '.join(reason.names)} not ready within {self._timeout:g} s."
            return self._explained(reason.names[0], what)
        return ProcessError("The launch stopped for no known reason.")

    def _explained(self, name: str, what: str, *, diagnosed: bool = True) -> LaunchFailed:
        """`what` happened to `name`, with what its log says about it."""
        lines = tail(self.log(name), _READ_LINES)
        known = diagnose(lines) if diagnosed else None
        if known is not None:
            price = price_without_hma(self.topology) if known.hma_off else ""
            what = f"{what[:-1]}: {known.cause}{price}"
        remedy = (known.remedy if known else "") or f"See {self.log(name) if lines else self.log_dir}."
        return LaunchFailed(what, remedy=remedy, lines=_shown(lines), name=name)


def price_without_hma(topology: Topology) -> str:
    """What HMA is worth for this model, as a sentence with a leading space; empty where it is worth nothing."""
    model = topology.model
    cost = model.cost_without_hma(model.max_positions)
    if cost <= 1.0:
        return ""
    return f" Without HMA a request of {model.max_positions:,} tokens takes {cost:.1f} times the KV space."


def _shown(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(plain(line) for line in lines[-_SHOWN_LINES:])
