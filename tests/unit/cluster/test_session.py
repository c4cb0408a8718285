"""The launch's shell with real processes that only pretend to be servers: ready, death, interrupt, deadline."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hma_cli.cluster import session as session_module
from hma_cli.cluster.guard import parent_of
from hma_cli.cluster.model import Model
from hma_cli.cluster.ports import Ports, is_free
from hma_cli.cluster.process import Grace
from hma_cli.cluster.proof import Moved, Probe, Unproven
from hma_cli.cluster.session import LaunchFailed, LaunchInterrupted, Session
from hma_cli.cluster.sizing import CpuShare
from hma_cli.cluster.topology import Role, Router, Server, Topology

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print("Application startup complete.", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SILENT = "import time; print('Starting to load model x', flush=True); time.sleep(600)"
FAILING = "import sys; print('ValueError: the weights are gone'); sys.exit(1)"
MODEL = Model(name="m", source="m", vocab_size=10, window=None, weight_bytes=0)
PROBE = Probe(
    prompt_tokens=1,
    max_model_len=1,
    seconds=0.0,
    moved=Moved(
        requests=1, bytes_planned=1, bytes_moved=1, descriptors_planned=1, descriptors_posted=1, claims_granted=1
    ),
)


Make = Callable[..., Session]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds sessions of pretended servers; `pair` gives two and a router, otherwise it is one engine."""
    with Ports() as ports:
        made: list[Session] = []

        def argv(program: str, port: int) -> tuple[str, ...]:
            return (sys.executable, "-c", program, str(port))

        def server(role: Role, program: str) -> Server:
            port = ports.pick()
            share = CpuShare(cores=((0,),), kv_bytes=1)
            return Server(
                role=role,
                index=0,
                http_port=port,
                control_port=ports.pick(),
                share=share,
                argv=argv(program, port),
                env=(),
            )

        def build(program: str = HEALTHY, *, decode: str | None = None, timeout: float = 30.0) -> Session:
            router = None
            servers = (server("engine", program),)
            if decode is not None:
                servers = (server("prefill", program), server("decode", decode))
                port = ports.pick()
                router = Router(
                    host="127.0.0.1", http_port=port, prometheus_port=ports.pick(), argv=argv(HEALTHY, port)
                )
            topology = Topology(model=MODEL, connector="hma" if router else None, servers=servers, router=router)
            made.append(
                Session(
                    topology,
                    ports=ports,
                    log_dir=tmp_path,
                    ready_timeout=timeout,
                    require_hma=True,
                    grace=Grace(interrupt=0.5, terminate=0.5, clear=0.5),
                )
            )
            return made[-1]

        yield build
        for session in made:
            session.close()


def gone(session: Session, pids: list[int]) -> bool:
    # A router that never started has its port still reserved by the fixture.
    ports = [server.http_port for server in session.topology.servers]
    return all(parent_of(pid) is None for pid in pids) and all(is_free(port) for port in ports)


def test_an_engine_becomes_ready_and_an_interrupt_ends_it(make: Make) -> None:
    session = make()
    session.run_until_ready()
    assert session.state.phase == "ready"
    pid = session.pid("engine")
    threading.Timer(0.2, session.interrupt).start()
    session.run_until_ended()
    assert session.state.child("engine").status is not None
    assert gone(session, [pid])


def test_a_pair_is_ready_after_its_proof_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "prove", lambda *_args, **_options: PROBE)
    session = make(decode=HEALTHY)
    session.run_until_ready()
    assert session.probe == PROBE
    assert [child.healthy for child in session.state.children] == [True] * 3


def test_a_pair_without_proof_is_stopped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Probe:
        raise Unproven("The probe was answered, but no KV moved.")

    monkeypatch.setattr(session_module, "prove", refuse)
    session = make(decode=HEALTHY)
    with pytest.raises(Unproven, match="no KV moved"):
        session.run_until_ready()
    assert gone(session, [session.pid(name) for name in ("prefill-0", "decode-0", "router")])


def test_an_error_inside_the_proof_is_told_and_stops_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "prove", lambda *_args, **_options: 1 / 0)
    session = make(decode=HEALTHY)
    with pytest.raises(session_module.ProcessError, match="ZeroDivisionError"):
        session.run_until_ready()


def test_a_failed_start_stops_the_other_server_and_shows_the_culprits_lines(make: Make) -> None:
    session = make(HEALTHY, decode=FAILING)
    with pytest.raises(LaunchFailed, match=r"decode-0 ended with exit code 1 .*: the weights are gone\.") as caught:
        session.run_until_ready()
    assert caught.value.lines == ("ValueError: the weights are gone",)
    assert gone(session, [session.pid("prefill-0")])


def test_a_server_that_dies_later_ends_the_launch(make: Make) -> None:
    session = make()
    session.run_until_ready()
    pid = session.pid("engine")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LaunchFailed, match="engine was ended by SIGKILL while it ran"):
        session.run_until_ended()
    assert gone(session, [pid])


def test_the_deadline_names_the_late_server(make: Make) -> None:
    session = make(HEALTHY, decode=SILENT, timeout=3.0)
    with pytest.raises(LaunchFailed, match=r"decode-0 not ready within 3 s") as caught:
        session.run_until_ready()
    assert caught.value.lines == ("Starting to load model x",)
    assert gone(session, [session.pid("decode-0")])


def test_an_interrupt_before_ready_is_an_error_of_its_own(make: Make) -> None:
    session = make(SILENT)
    threading.Timer(0.7, session.interrupt).start()
    with pytest.raises(LaunchInterrupted):
        session.run_until_ready()
    assert gone(session, [session.pid("engine")])


def test_closing_twice_is_fine(make: Make) -> None:
    session = make()
    session.run_until_ready()
    session.close()
    session.close()
