"""`hma inspect-plan`: what a hand-over will move, per cache group, before anything runs."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

import typer

from connector.errors import ConfigError, PeerUnreachable
from hma_cli.report.render import render

if TYPE_CHECKING:
    from hma_cli.inspection.inspect import Request
    from hma_cli.models.blocks import MemoryLayout
    from hma_cli.report.result import Result


class Device(StrEnum):
    """Where the engines run; decides default block sizes."""

    cuda = "cuda"
    cpu = "cpu"


class KvLayoutChoice(StrEnum):
    """K and V of a token in one page (vLLM 0.32), or in two regions (older releases)."""

    PACKED = "packed"
    SPLIT = "split"


class MemoryLayoutChoice(StrEnum):
    """Whether blocks of one layer, or layers of one block, lie side by side."""

    layer_compact = "layer-compact"
    block_outermost = "block-outermost"


class PoolChoice(StrEnum):
    """What the block pools have been through."""

    fresh = "fresh"
    steady = "steady"
    random = "random"


class FormatChoice(StrEnum):
    """How the result is printed."""

    table = "table"
    json = "json"
    csv = "csv"


def inspect_plan(
    model: Annotated[
        str | None,
        typer.Option(help="A config.json or its directory, a model of the catalog, or a hub id.", show_default=False),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 4096,
    cached_tokens: Annotated[int, typer.Option(min=0, help="Of these, tokens in D's prefix cache.")] = 0,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a block, on both sides. Default: vLLM's for the model.")
    ] = None,
    prefill_block_size: Annotated[int | None, typer.Option(min=1, help="P's, where it differs.")] = None,
    decode_block_size: Annotated[int | None, typer.Option(min=1, help="D's, where it differs.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size, on both sides.")] = 1,
    prefill_tp: Annotated[int | None, typer.Option(min=1, help="P's, where it differs.")] = None,
    decode_tp: Annotated[int | None, typer.Option(min=1, help="D's, where it differs.")] = None,
    device: Annotated[Device, typer.Option(help="Where the engines run: block sizes differ.")] = Device.cuda,
    dtype: Annotated[str | None, typer.Option(help="Data type of the weights. Default: the model's.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Data type of the KV cache, as vLLM's --kv-cache-dtype.")] = "auto",
    ssm_dtype: Annotated[
        str, typer.Option(help="Data type of recurrent states, as vLLM's --mamba-ssm-cache-dtype.")
    ] = "auto",
    kv_layout: Annotated[
        KvLayoutChoice, typer.Option(help="K and V in one page (vLLM 0.32) or apart (older releases).")
    ] = KvLayoutChoice.PACKED,
    memory_layout: Annotated[
        MemoryLayoutChoice | None, typer.Option(help="Which lie side by side. Default: vLLM's for the model.")
    ] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option("--prefix-caching/--no-prefix-caching", help="Default: vLLM's for the model.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest request, for states without prefix caching. Default: the prompt.")
    ] = None,
    pool: Annotated[
        PoolChoice, typer.Option(help="State of the block pools; it decides what merges.")
    ] = PoolChoice.fresh,
    seed: Annotated[int, typer.Option(min=0, help="For steady and random pools.")] = 0,
    memory: Annotated[float, typer.Option(min=0.001, max=1e9, help="GiB of KV cache on each rank.")] = 16.0,
    bandwidth: Annotated[float, typer.Option(min=0.001, max=1e9, help="GB/s between P and D.")] = 12.5,
    explain: Annotated[
        int | None, typer.Option(min=0, help="Walk through this group's arithmetic.", show_default=False)
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="MODEL2", help="Set another model beside it.", show_default=False)
    ] = None,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Plan with the groups of the server at this control address, and compare.",
            show_default=False,
        ),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never ask the hub.")] = False,
    output: Annotated[FormatChoice, typer.Option("--format", help="How the result is printed.")] = FormatChoice.table,
) -> None:
    """Show what moves from prefill to decode, per cache group, without a GPU, vLLM or weights.

    [dim]hma inspect-plan --model google/gemma-3-4b-it --prompt-tokens 4032 --block-size 64[/]
    """
    _import_numpy()
    from hma_cli.inspection.arena import KvLayout
    from hma_cli.inspection.inspect import Request
    from hma_cli.inspection.pool import PoolState

    for option, value in (("--memory", memory), ("--bandwidth", bandwidth)):
        if math.isnan(value):  # a range does not keep it out: it is neither below nor above any bound
            raise ConfigError(f"{option} is not a number.", remedy="Give a number above 0, or leave it out.")
    if compare is not None and explain is not None:
        raise ConfigError("--explain and --compare do not go together.", remedy="Explain one model at a time.")
    request = Request(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        prefill_tp=prefill_tp or tp,
        decode_tp=decode_tp or tp,
        prefill_block_size=prefill_block_size or block_size,
        decode_block_size=decode_block_size or block_size,
        device=device.value,
        dtype=dtype,
        kv_dtype=kv_dtype,
        ssm_dtype=ssm_dtype,
        kv_layout=KvLayout(kv_layout.value),
        memory_layout=cast("MemoryLayout", memory_layout.replace("-", "_")) if memory_layout else None,
        prefix_caching=prefix_caching,
        max_model_len=max_model_len,
        pool=PoolState(pool.value),
        seed=seed,
        memory_bytes=int(memory * (1 << 30)),
        bandwidth=bandwidth * 1e9,
    )
    if live is not None:
        if compare is not None:
            raise ConfigError("--live and --compare do not go together.", remedy="Give one of them.")
        result = running_plan(live, request, model=model, explain=explain, offline=offline)
    elif model is not None:
        result = plan(model, request, explain=explain, compare=compare, offline=offline)
    else:
        raise ConfigError("No model is named.", remedy="Give --model, or --live ADDRESS of a running server.")
    render(result, output.value)
    raise typer.Exit(result.exit_code)


def _import_numpy() -> None:
    """Import numpy without the threads that its BLAS would start on every core: no matrix is multiplied here."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = before or "1"
    try:
        import numpy  # noqa: F401
    finally:
        if before is None:
            del os.environ[name]


def plan(
    model: str, request: Request, *, explain: int | None = None, compare: str | None = None, offline: bool = False
) -> Result:
    """The plan of one model, or of two side by side. HmaError for what cannot be found or planned."""
    from hma_cli.inspection.inspect import inspect
    from hma_cli.inspection.view import compared, view
    from hma_cli.models.lookup import find

    found = inspect(find(model, offline=offline), request)
    if compare is not None:
        return compared(found, inspect(find(compare, offline=offline), request))
    return view(found, group=explain)


def running_plan(
    address: str, request: Request, *, model: str | None = None, explain: int | None = None, offline: bool = False
) -> Result:
    """The plan of a running server from its own groups and regions, and every difference from the offline one."""
    from connector.control.client import describe
    from hma_cli.inspection import live
    from hma_cli.inspection.inspect import inspect
    from hma_cli.inspection.view import live_view
    from hma_cli.models.lookup import find

    try:
        running = describe(*live.address(address))
    except PeerUnreachable as error:
        raise PeerUnreachable(
            error.message,
            remedy="Is the server running, and is this its control address? `hma launch` shows it in the column "
            "`control`. A server with a key answers only who has it (HMA_KEY).",
        ) from error
    planned = inspect(find(model or running.model, offline=offline), live.asked_of(running, request))
    found = live.live(planned, running)
    return live_view(found, running, live.differences(planned, found, running), group=explain)
