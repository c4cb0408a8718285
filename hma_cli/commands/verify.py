"""`hma verify`: the same questions through a pair and to a single engine, and a verdict on the difference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from connector.errors import ConfigError
from hma_cli.commands.launch import ConnectorChoice, FormatChoice
from hma_cli.report.render import render
from hma_cli.report.result import Exit, Result

if TYPE_CHECKING:
    from hma_cli.evaluation.run import Request, Urls

TASKS = ("gsm8k",)


def verify(
    task: Annotated[str, typer.Argument(help="The lm-eval task: gsm8k.")],
    limit: Annotated[int, typer.Option(min=1, help="Questions to ask.")] = 8,
    model: Annotated[
        str | None,
        typer.Option(help="Model directory or hub id. Default: the embedded Gemma 3 270M.", show_default=False),
    ] = None,
    pair: Annotated[str | None, typer.Option(help="A running pair's router. Needs the next three.")] = None,
    baseline: Annotated[str | None, typer.Option(help="A running single engine.")] = None,
    prefill: Annotated[str | None, typer.Option(help="The pair's prefill server, whose metrics are read.")] = None,
    decode: Annotated[str | None, typer.Option(help="The pair's decode server, whose metrics are read.")] = None,
    dataset: Annotated[
        str, typer.Option(help="shipped, hub, or a directory with train.jsonl and test.jsonl.")
    ] = "shipped",
    num_fewshot: Annotated[int, typer.Option(min=0, help="Worked examples in each prompt.")] = 5,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 4,
    output: Annotated[Path | None, typer.Option(help="Write the report and all samples here.")] = None,
    connector: Annotated[
        ConnectorChoice, typer.Option(help="hma: ours. nixl: vLLM's own, for comparison.")
    ] = ConnectorChoice.hma,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a KV block, for an own launch.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest request in tokens, for an own launch.")
    ] = None,
    fmt: Annotated[FormatChoice, typer.Option("--format", help="How the result is printed.")] = FormatChoice.table,
) -> None:
    """Ask a pair and a single engine the same questions with lm-eval, and compare answer by answer.

    Launches both by itself unless --pair is given. Exit 0: every answer is the single engine's and the KV moved as
    planned. Exit 1: it is not, or the run proves nothing. Exit 2: it could not be run.
    """
    from hma_cli.evaluation.questions import load
    from hma_cli.evaluation.run import Request

    if task not in TASKS:
        raise ConfigError(f"There is no task {task!r} here.", remedy=f"This version verifies: {', '.join(TASKS)}.")
    request = Request(
        urls=running_urls(pair=pair, baseline=baseline, prefill=prefill, decode=decode),
        questions=load(dataset),
        limit=limit,
        num_fewshot=num_fewshot,
        concurrency=concurrency,
        connector=connector.value,
        model=model,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    result = run(request, output)
    render(result, fmt.value)
    if result.exit_code is not Exit.OK:
        raise typer.Exit(result.exit_code)


def run(request: Request, output: Path | None = None) -> Result:
    """Verify, and write the output directory when one is asked for."""
    from hma_cli.cluster.stack import require_stack
    from hma_cli.evaluation.run import verify, write_output

    own = request.urls is None
    require_stack(connector=request.connector if own else None, router=own)
    run = verify(request)
    from hma_cli.evaluation.view import result_of

    result = result_of(run)
    if output is not None:
        write_output(output, run, {"schema": result.schema, **result.data})
    return result


def running_urls(*, pair: str | None, baseline: str | None, prefill: str | None, decode: str | None) -> Urls | None:
    """All four URLs or none. ConfigError names the one that is missing or wrong."""
    from hma_cli.evaluation.preflight import base_url
    from hma_cli.evaluation.run import Urls

    given = {"--pair": pair, "--baseline": baseline, "--prefill": prefill, "--decode": decode}
    present = {option: base_url(url, option) for option, url in given.items() if url is not None}
    if not present:
        return None
    if missing := [option for option in given if option not in present]:
        raise ConfigError(
            f"{' and '.join(present)} given without {' and '.join(missing)}.",
            remedy="Give all four: answers are compared with the baseline's, and what moved is read from the metrics "
            "of prefill and decode. Give none to launch them.",
        )
    return Urls(
        pair=present["--pair"],
        baseline=present["--baseline"],
        prefill=present["--prefill"],
        decode=present["--decode"],
    )
