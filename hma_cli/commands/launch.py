"""`hma launch`: a prefill/decode pair with a router on this machine, proven to move KV before it is called ready."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from connector.errors import ConfigError
from hma_cli.report.live import LiveView, Row
from hma_cli.report.render import Format, render, talk
from hma_cli.report.result import Finding, Result, Table

if TYPE_CHECKING:
    from hma_cli.cluster.proof import Probe
    from hma_cli.cluster.session import Session
    from hma_cli.cluster.supervisor import LaunchState
    from hma_cli.cluster.topology import Settings, Topology

SCHEMA = "hma.launch/1"
PLAN_SCHEMA = "hma.launch-plan/1"
GIB = 1 << 30


class ConnectorChoice(StrEnum):
    """Which connector the pair uses."""

    hma = "hma"
    nixl = "nixl"


class FailurePolicy(StrEnum):
    """What decode does with a prompt whose KV cannot be had."""

    recompute = "recompute"
    fail = "fail"


class FormatChoice(StrEnum):
    """How the result is printed."""

    table = "table"
    json = "json"


def launch(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Model directory or hub id. Default: the embedded Gemma 3 270M.", show_default=False),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill servers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode servers.")] = 1,
    connector: Annotated[
        ConnectorChoice, typer.Option(help="hma: ours. nixl: vLLM's own, for comparison.")
    ] = ConnectorChoice.hma,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a KV block. Default: vLLM's.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest request in tokens. Default: what the model and the KV space allow."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The router's port. Default: a free one.")] = None,
    host: Annotated[str, typer.Option(help="The router's address. The servers stay on loopback.")] = "127.0.0.1",
    kv_space: Annotated[
        float | None,
        typer.Option(help="GiB of KV cache for each server on CPU. Default: they share an eighth of the free memory."),
    ] = None,
    failure_policy: Annotated[
        FailurePolicy, typer.Option(help="What decode does with a prompt whose KV cannot be had.")
    ] = FailurePolicy.recompute,
    require_hma: Annotated[
        bool, typer.Option("--require-hma/--no-require-hma", help="Refuse to run when HMA ends up off.")
    ] = True,
    print_only: Annotated[bool, typer.Option("--print", help="Show the commands and start nothing.")] = False,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds until everything must be ready.")] = 600.0,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the logs go. Default: the user's state directory.", show_default=False)
    ] = None,
    output: Annotated[FormatChoice, typer.Option("--format", help="How the summary is printed.")] = FormatChoice.table,
) -> None:
    """Start prefill and decode servers and a router, and prove that KV moves between them.

    Stays in the foreground; Ctrl-C stops everything. Arguments after -- go to every vLLM server.
    """
    from hma_cli.cluster.topology import Settings

    settings = Settings(
        prefill=prefill,
        decode=decode,
        connector=cast("Any", connector.value),
        block_size=block_size,
        max_model_len=max_model_len,
        port=port,
        host=host,
        kv_space_gib=kv_space,
        failure_policy=cast("Any", failure_policy.value),
        require_hma=require_hma,
        extra_args=vllm_arguments(context.args),
    )
    fmt: Format = output.value
    if print_only:
        render(plan(settings, model=model, state_dir=state_dir), fmt)
        return
    run(settings, model=model, ready_timeout=ready_timeout, state_dir=state_dir, fmt=fmt)


def vllm_arguments(words: list[str]) -> tuple[str, ...]:
    """What follows `--`. ConfigError for a stray word, which vLLM would refuse a minute later."""
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"Unexpected argument '{words[0]}'.",
            remedy="Give the model with --model; vLLM's own options follow `--`, for example: -- --enforce-eager",
        )
    return tuple(words)


def plan(settings: Settings, *, model: str | None, state_dir: Path | None = None) -> Result:
    """`--print`: the commands as they would run, with ports that are free now."""
    from hma_cli.cluster.launch import planned_launch
    from hma_cli.cluster.topology import shell_lines

    with planned_launch(settings, model=model, state_dir=state_dir) as planned:
        lines = shell_lines(planned.topology)
        processes = planned.topology.processes
        commands = [
            {"name": process.name, "argv": list(process.argv), "env": dict(process.env), "shell": line}
            for process, line in zip(processes, lines, strict=True)
        ]
    return Result(schema=PLAN_SCHEMA, data={"commands": commands}, text="\n".join(lines))


def run(
    settings: Settings, *, model: str | None, ready_timeout: float, state_dir: Path | None = None, fmt: Format = "table"
) -> None:
    """Launch, print the summary, stay until Ctrl-C. HmaError when the start fails or a child dies."""
    from hma_cli.cluster.launch import make_log_directory, planned_launch
    from hma_cli.cluster.session import Session

    with planned_launch(settings, model=model, state_dir=state_dir) as planned:
        make_log_directory(planned.log_dir)
        view = LiveView(f"Launching {planned.topology.model.name}")
        session = Session(
            planned.topology,
            ports=planned.ports,
            log_dir=planned.log_dir,
            ready_timeout=ready_timeout,
            require_hma=settings.require_hma,
            on_change=lambda state: view.update(rows(state)),
        )
        with _signals(session), _told_lines():
            with view:
                session.run_until_ready()
            try:
                render(summary(session), fmt)
                sys.stdout.flush()
                talk("[dim]Ctrl-C stops everything.[/]")
            except BaseException:
                session.close()
                raise
            session.run_until_ended()
    talk("Stopped.")


def rows(state: LaunchState) -> tuple[Row, ...]:
    """The live view's rows."""
    from hma_cli.cluster.readiness import plain

    now = time.monotonic()
    shown = [
        Row(
            name=child.name,
            stage=child.stage.text,
            seconds=now - child.since if child.since else 0.0,
            line=plain(child.last_line),
        )
        for child in state.children
    ]
    if state.phase == "probing":
        shown.append(Row(name="probe", stage="sending a prompt through the pair", seconds=0.0))
    return tuple(shown)


def summary(session: Session) -> Result:
    """What is running and what was proven."""
    topology, probe = session.topology, session.probe
    if topology.router is None or probe is None:
        raise ConfigError("Only a pair that is ready has a summary.")
    curl = _curl(topology)
    return Result(
        schema=SCHEMA,
        data=_data(session, probe, curl),
        tables=(_server_table(session), *_group_tables(probe)),
        findings=_findings(session, probe),
        text=f"Ready: {topology.router.url}\n\n{curl}\n",
    )


def _data(session: Session, probe: Probe, curl: str) -> dict[str, Any]:
    topology = session.topology
    servers = [
        {
            "name": server.name,
            "role": server.role,
            "url": server.url,
            "control_port": server.control_port if topology.connector == "hma" else None,
            "pid": session.pid(server.name),
            "log": str(session.log(server.name)),
            **_share(server.share),
        }
        for server in topology.servers
    ]
    described = probe.engines[0][1] if probe.engines else None
    return {
        "model": topology.model.name,
        "connector": topology.connector,
        "router": topology.router.url if topology.router else None,
        "servers": servers,
        "log_dir": str(session.log_dir),
        "max_model_len": probe.max_model_len,
        "hma": described.hma_enabled if described else None,
        "hybrid": probe.hybrid,
        "groups": [
            {
                "index": group.index,
                "kind": group.kind,
                "window": group.window,
                "layers": group.num_layers,
                "block_size": group.block_size,
                "page_bytes": group.page_bytes,
            }
            for group in (described.groups if described else ())
        ],
        "capacity": {
            "request_tokens": described.capacity.request_tokens,
            "hma_tokens": described.capacity.hma_tokens,
            "full_tokens": described.capacity.full_tokens,
        }
        if described
        else None,
        "probe": {
            "prompt_tokens": probe.prompt_tokens,
            "requests": probe.moved.requests,
            "bytes_planned": probe.moved.bytes_planned,
            "bytes_moved": probe.moved.bytes_moved,
            "descriptors_planned": probe.moved.descriptors_planned,
            "descriptors_posted": probe.moved.descriptors_posted,
            "seconds": round(probe.seconds, 3),
        },
        "curl": curl,
    }


def _share(share: Any) -> dict[str, Any]:
    from hma_cli.cluster.sizing import CpuShare

    if isinstance(share, CpuShare):
        return {"cores": [list(worker) for worker in share.cores], "kv_bytes": share.kv_bytes}
    return {"gpus": list(share.gpus), "gpu_memory_utilization": share.utilisation}


def _server_table(session: Session) -> Table:
    from hma_cli.cluster.sizing import CpuShare

    lines: list[tuple[object, ...]] = []
    for server in session.topology.servers:
        share = server.share
        place = share.text if isinstance(share, CpuShare) else f"GPU {','.join(share.gpus)}"
        space = f"{share.kv_bytes / GIB:g} GiB" if isinstance(share, CpuShare) else f"{share.utilisation:.0%} of memory"
        control = str(server.control_port) if session.topology.connector == "hma" else "–"
        lines.append((server.name, server.url, control, str(session.pid(server.name)), place, space))
    if (router := session.topology.router) is not None:
        lines.append((router.name, router.url, "–", str(session.pid(router.name)), "any", "–"))
    return Table(
        title=f"{session.topology.model.name} with {session.topology.connector}",
        columns=("process", "URL", "control", "pid", "runs on", "KV space"),
        rows=tuple(lines),
    )


def _group_tables(probe: Probe) -> tuple[Table, ...]:
    if not probe.engines:
        return ()
    return (
        Table(
            title="KV-cache groups, the same on every server",
            columns=("group", "kind", "layers", "window", "block size", "page bytes"),
            rows=tuple(
                (
                    group.index,
                    group.kind,
                    group.num_layers,
                    "–" if group.window is None else f"{group.window:,}",
                    group.block_size,
                    group.page_bytes,
                )
                for group in probe.engines[0][1].groups
            ),
        ),
    )


def _findings(session: Session, probe: Probe) -> tuple[Finding, ...]:
    moved = probe.moved
    found = [
        Finding(
            level="ok",
            text=(
                f"A probe of {probe.prompt_tokens:,} tokens moved {moved.bytes_moved:,} bytes "
                f"(planned {moved.bytes_planned:,}) in {moved.descriptors_posted:,} descriptors "
                f"for {moved.descriptors_planned:,} pages."
                if session.topology.connector == "hma"
                else f"A probe of {probe.prompt_tokens:,} tokens moved {moved.bytes_moved:,} bytes "
                f"in {moved.descriptors_posted:,} descriptors."
            ),
        )
    ]
    found += _hma_findings(session, probe)
    found.append(Finding(level="note", text=f"Logs: {session.log_dir}"))
    return tuple(found)


def _hma_findings(session: Session, probe: Probe) -> list[Finding]:
    if not probe.engines:
        return [Finding(level="note", text="vLLM's own connector does not describe its groups or capacity.")]
    capacity = probe.engines[0][1].capacity
    off = [name for name, engine in probe.engines if not engine.hma_enabled]
    if off:
        return [
            Finding(
                level="warning",
                text=(
                    f"HMA IS OFF in {' and '.join(off)}{_off_cause(session, off[0])}. The KV cache holds "
                    f"{capacity.full_tokens:,} tokens.{_price(session)}"
                ),
                remedy="Every layer keeps and moves the whole prompt.",
            )
        ]
    if not probe.hybrid:
        return [
            Finding(
                level="note",
                text="Every layer attends to everything: HMA brings nothing for this model. "
                f"The KV cache holds {capacity.full_tokens:,} tokens.",
            )
        ]
    gain = capacity.hma_tokens / capacity.full_tokens if capacity.full_tokens else 0.0
    return [
        Finding(
            level="ok",
            text=f"HMA is on. In requests of {capacity.request_tokens:,} tokens the KV cache holds "
            f"{capacity.hma_tokens:,} tokens, without HMA {capacity.full_tokens:,} ({gain:.1f} times as many).",
        )
    ]


def _off_cause(session: Session, name: str) -> str:
    from hma_cli.cluster.diagnosis import hma_off_cause
    from hma_cli.cluster.process import tail
    from hma_cli.cluster.topology import HMA_OFF_ARGUMENT

    server = next(server for server in session.topology.servers if server.name == name)
    if HMA_OFF_ARGUMENT in server.argv:
        return f", as {HMA_OFF_ARGUMENT} asks"
    cause = hma_off_cause(tail(session.log(name), 4000, limit=1 << 22))
    return f": {cause}" if cause else ""


def _price(session: Session) -> str:
    from hma_cli.cluster.session import price_without_hma

    return price_without_hma(session.topology)


def _curl(topology: Topology) -> str:
    prompt: object = "The capital of France is" if topology.model.has_tokenizer else [20, 21, 22, 23]
    body = json.dumps({"model": topology.model.name, "prompt": prompt, "max_tokens": 16, "temperature": 0})
    url = topology.router.url if topology.router else ""
    return shlex.join(["curl", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body])


@contextmanager
def _signals(session: Session) -> Iterator[None]:
    """Ctrl-C, TERM and HUP end the session in order; a second one changes nothing, the stop is bounded anyway."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: session.interrupt()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _told_lines() -> Iterator[None]:
    """Show the end of the culprit's log before the error's one sentence."""
    from rich.markup import escape

    from hma_cli.cluster.session import LaunchFailed

    try:
        yield
    except LaunchFailed as error:
        if error.lines:
            talk(f"[bold]Last lines of {error.name}:[/]")
            for line in error.lines:
                talk(f"  [dim]{escape(line)}[/]")
        raise
