"""`hma model`: the embedded model, listed, prepared, located."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from connector.errors import ModelError
from hma_cli.report.render import render
from hma_cli.report.result import Exit, Finding, Result, Table

if TYPE_CHECKING:
    from hma_cli.models.embedded import State

SCHEMA = "hma.model/1"
_PREPARE = "Prepare it with: hma model prepare"

app = typer.Typer(no_args_is_help=True, help="The embedded model: list it, prepare it, find its directory.")


class FormatChoice(StrEnum):
    """How the result is printed."""

    table = "table"
    json = "json"


Output = Annotated[FormatChoice, typer.Option("--format", help="How the result is printed.")]
Verify = Annotated[bool, typer.Option("--verify", help="Check every file's checksum, not only sizes and times.")]


@app.command("list")
def list_command(verify: Verify = False, output: Output = FormatChoice.table) -> None:
    """Show the embedded model, its state, its size and its place."""
    result = list_models(verify=verify)
    render(result, output.value)
    raise typer.Exit(result.exit_code)


@app.command("prepare")
def prepare_command(output: Output = FormatChoice.table) -> None:
    """Convert the embedded model where that has not been done yet, and verify its checksums."""
    render(prepare(), output.value)


@app.command("path")
def path_command(verify: Verify = False, output: Output = FormatChoice.table) -> None:
    """Print the directory of the prepared model, and nothing else."""
    render(locate(verify=verify), output.value)


def list_models(*, verify: bool = False) -> Result:
    """Each embedded model with its state; a damaged one is a problem."""
    from hma_cli.models import embedded, source

    state = embedded.inspect(full=verify)
    finding = {
        "ready": Finding(level="ok", text=f"{embedded.NAME} is ready in {state.path}."),
        "absent": Finding(level="note", text=f"{embedded.NAME} is converted on first use.", remedy=_PREPARE),
        "damaged": Finding(level="problem", text=f"{embedded.NAME} is damaged: {state.reason}.", remedy=_PREPARE),
    }[state.status]
    size = f"{state.total_bytes / 1e6:,.0f} MB" if state.total_bytes else "–"
    return Result(
        schema=SCHEMA,
        data={"models": [_data(state) | {"title": source.TITLE, "licence": source.LICENCE}]},
        tables=(
            Table(
                title="Embedded models",
                columns=("name", "model", "state", "size"),
                rows=((embedded.NAME, source.TITLE, state.status, size),),
                note=f"Licence: {source.LICENCE}",
            ),
        ),
        findings=(finding,),
        exit_code=_exit_code(state),
    )


def prepare() -> Result:
    """Make the checkpoint ready; seconds is what that took."""
    from hma_cli.models import embedded

    before = embedded.inspect(full=True)
    start = time.monotonic()
    embedded.prepare()
    seconds = time.monotonic() - start
    state = embedded.inspect()
    what = "was ready already; every checksum is right" if before.status == "ready" else "is ready"
    return Result(
        schema=SCHEMA,
        data={"models": [_data(state) | {"seconds": round(seconds, 1)}]},
        findings=(Finding(level="ok", text=f"{embedded.NAME} {what}: {state.path} ({seconds:.1f} s)."),),
    )


def locate(*, verify: bool = False) -> Result:
    """The directory as plain text, for scripts. ModelError unless the model is ready."""
    from hma_cli.models import embedded

    state = embedded.inspect(full=verify)
    if state.status != "ready":
        why = "is not prepared yet" if state.status == "absent" else f"is damaged: {state.reason}"
        raise ModelError(f"{embedded.NAME} {why}.", remedy=_PREPARE)
    return Result(schema=SCHEMA, data={"models": [_data(state)]}, text=str(state.path))


def _data(state: State) -> dict[str, object]:
    from hma_cli.models import embedded

    return {
        "name": embedded.NAME,
        "status": state.status,
        "reason": state.reason,
        "path": str(state.path),
        "bytes": state.total_bytes,
    }


def _exit_code(state: State) -> Exit:
    return Exit.CHECK_FAILED if state.status == "damaged" else Exit.OK
