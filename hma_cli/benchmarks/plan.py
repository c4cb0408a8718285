"""Planning time of one request, beside what vLLM's in-tree connector computes for the same request in the same run.

Ours is all that D does from two block lists to rows: pair, expand, order, find the runs, cut into parts. The in-tree
side is its `_compute_desc_ids` for both engines, called as it stands in the installed vLLM, on the block lists that it
clips.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from connector.errors import StackError
from connector.plan.build import Descriptors, descriptors, live_blocks, pair_blocks
from connector.plan.geometry import Geometry
from connector.plan.join import join
from hma_cli.inspection.comparison import HandOver, block_tables, clipped
from hma_cli.inspection.inspect import Request, inspect
from hma_cli.models.lookup import find
from hma_cli.report.render import render
from hma_cli.report.result import Finding, Result, Table

SCHEMA = "hma.bench-plan/1"
PART_RUNS = 1024  # as the connector cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One request: median seconds of both sides, interleaved, and what each comes to."""

    prompt_tokens: int
    ours: float
    theirs: float
    our_rows: int
    our_runs: int
    their_rows: int

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def measure(model: str, prompt_tokens: int, *, block_size: int, repeats: int) -> Measured:
    """Time both sides `repeats` times in turn. StackError without vLLM."""
    found = inspect(find(model), _request(prompt_tokens, block_size))
    ours, theirs = _ours(found.case), _in_tree(found.case)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    gc.disable()
    try:
        for _ in range(repeats):
            for name, run in (("ours", ours), ("theirs", theirs)):
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    rows = ours()
    return Measured(
        prompt_tokens=prompt_tokens,
        ours=statistics.median(seconds["ours"]),
        theirs=statistics.median(seconds["theirs"]),
        our_rows=rows.num_pages,
        our_runs=rows.runs,
        their_rows=len(theirs()),
    )


def bench(model: str, lengths: tuple[int, ...], *, block_size: int, repeats: int) -> Result:
    """A table with one row a prompt length."""
    found = [measure(model, length, block_size=block_size, repeats=repeats) for length in lengths]
    rows = tuple(
        (
            f"{one.prompt_tokens:,}",
            f"{1e3 * one.ours:.3f}",
            f"{1e3 * one.theirs:.3f}",
            f"{one.ratio:.2f}",
            f"{one.our_rows:,}",
            f"{one.their_rows:,}",
        )
        for one in found
    )
    columns = ("prompt tokens", "ours, ms", "in-tree, ms", "ratio", "our descriptors", "in-tree descriptors")
    return Result(
        schema=SCHEMA,
        data={
            "model": model,
            "block_size": block_size,
            "repeats": repeats,
            "rows": [
                {
                    "prompt_tokens": one.prompt_tokens,
                    "ours_seconds": one.ours,
                    "in_tree_seconds": one.theirs,
                    "ratio": one.ratio,
                    "our_descriptors": one.our_rows,
                    "our_runs": one.our_runs,
                    "in_tree_descriptors": one.their_rows,
                }
                for one in found
            ],
        },
        tables=(Table(title=f"Planning {model}, blocks of {block_size}", columns=columns, rows=rows, right=columns),),
        findings=(
            Finding(
                level="note",
                text="Ours pairs blocks by position, orders them and finds what merges; the in-tree connector numbers "
                f"its descriptors and leaves merging to NIXL. Medians of {repeats} runs, in turn.",
            ),
        ),
    )


def _request(prompt_tokens: int, block_size: int) -> Request:
    return Request(prompt_tokens=prompt_tokens, prefill_block_size=block_size, decode_block_size=block_size)


def _ours(case: HandOver) -> Callable[[], Descriptors]:
    tables_p, tables_d = block_tables(case, case.handed_tokens)
    offered = [
        live_blocks(table.kind, table.block_size, ids, case.handed_tokens)
        for table, ids in zip(case.prefill.tables, tables_p, strict=True)
    ]
    joined = join(case.decode.ranks[0], case.prefill.ranks)[0]

    def run() -> Descriptors:
        pairs = []
        for table, blocks, ids in zip(case.decode.tables, offered, tables_d, strict=True):
            assert blocks is not None, "the simulated pool keeps live blocks"
            pairs.append(
                pair_blocks(
                    kind=table.kind,
                    block_size=table.block_size,
                    remote_block_size=table.block_size,
                    num_tokens=case.handed_tokens,
                    cached_tokens=0,
                    offered=blocks,
                    table=ids,
                )
            )
        rows = descriptors(pairs, joined)
        rows.parts(PART_RUNS)
        return rows

    return run


def _in_tree(case: HandOver) -> Callable[[], Any]:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    except ImportError as error:
        raise StackError(f"vLLM's own connector cannot be imported: {error}.", remedy="scripts/setup") from error
    owners = _owners(case.decode.ranks[0])
    worker: Any = SimpleNamespace(
        _has_mamba=False,
        _transfer_layer_group_ids=[],
        num_regions=len(owners),
        region_group_ids=owners,
        _uses_region_group_mapping=len(set(owners)) > 1,
    )
    lists: list[Any] = [
        tuple(clipped(ids, table.kind, table.block_size) for table, ids in zip(engine.tables, tables, strict=True))
        for engine, tables in zip((case.prefill, case.decode), block_tables(case, case.prompt_tokens), strict=True)
    ]

    def run() -> Any:
        for ids, engine in zip(lists, (case.prefill, case.decode), strict=True):
            found = NixlPullConnectorWorker._compute_desc_ids(
                worker,
                block_ids=ids,
                dst_num_blocks=engine.num_blocks,
                block_size_ratio=None,
                physical_blocks_per_logical=1,
            )
        return found

    return run


def _owners(geometry: Geometry) -> list[int]:
    """For each region the group that has it to itself, or -1, as the in-tree worker finds when it registers them."""
    users: list[set[int]] = [set() for _ in geometry.regions]
    for index, group in enumerate(geometry.groups):
        for page in group.pages:
            users[page.region].add(index)
    return [min(groups) if len(groups) == 1 else -1 for groups in users]


def main() -> None:
    """`scripts/bench plan`."""
    parser = argparse.ArgumentParser(prog="scripts/bench plan", description=__doc__)
    parser.add_argument("--model", default="google/gemma-3-27b-it")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[4096, 32_768, 131_072])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = bench(given.model, tuple(given.prompt_tokens), block_size=given.block_size, repeats=given.repeats)
    render(result, "json" if given.json else "table")


if __name__ == "__main__":
    main()
