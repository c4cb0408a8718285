"""The Typer app: wiring only. Each command lives in `hma_cli.commands` and is imported when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from connector import __version__
from connector.errors import HmaError
from hma_cli.commands import inspect_plan, launch, model, verify
from hma_cli.report.render import render_error
from hma_cli.report.result import Exit

app = typer.Typer(
    name="hma",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Serve hybrid-attention models with disaggregated prefill and decode on vLLM, and prove what moves.",
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"hma {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options for every command."""


app.command("launch", context_settings={"allow_extra_args": True})(launch.launch)
app.command("inspect-plan")(inspect_plan.inspect_plan)
app.command("verify")(verify.verify)
app.add_typer(model.app, name="model")


def main() -> None:
    """Console entry point: every HmaError becomes one sentence with its remedy and exit code 2."""
    try:
        app()
    except HmaError as error:
        if "--debug" in sys.argv:
            raise
        render_error(error)
        sys.exit(Exit.TOOL_FAILED)
