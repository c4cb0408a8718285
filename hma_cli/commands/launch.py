"""`hma launch`: a prefill/decode pair with a router on this machine, proven to move KV before it is called ready."""

from __future__ import annotations

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
from hma_cli.report.result import Result

if TYPE_CHECKING:
    from hma_cli.cluster.session import Session
    from hma_cli.cluster.supervisor import LaunchState
    from hma_cli.cluster.topology import Settings

PLAN_SCHEMA = "hma.launch-plan/1"


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
    from hma_cli.cluster.summary import summary

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
