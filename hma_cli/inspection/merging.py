"""Why descriptors do not merge, in words."""

from __future__ import annotations

import numpy as np

from connector.plan.kinds import State
from hma_cli.inspection.comparison import GroupPlan, HandOver
from hma_cli.inspection.pool import PREFILL_STEP, PoolState

_HISTORY = {
    PoolState.FRESH: f"P computed the prompt in steps of {PREFILL_STEP:,} tokens, and each step takes blocks for one "
    "group after another",
    PoolState.STEADY: "freed blocks come back in another order than they were taken",
    PoolState.RANDOM: "the pool's order is arbitrary",
}


def reasons(case: HandOver, groups: tuple[GroupPlan, ...]) -> tuple[str, ...]:
    """One sentence for all groups to which it applies."""
    found: dict[str, list[int]] = {}
    for group in groups:
        text = _reason(case, group)
        if text:
            found.setdefault(text, []).append(group.index)
    return tuple(f"{_named(indices)}: {text}" for text, indices in found.items())


def _reason(case: HandOver, group: GroupPlan) -> str:
    blocks = len(group.pairs)
    if blocks < 2 or group.amount.runs == 0:
        return ""
    apart = _sliced(case, group) or _gap(case, group)
    if apart:
        return apart
    order = np.argsort(group.pairs.remote, kind="stable")
    remote, local = np.diff(group.pairs.remote[order]) != 1, np.diff(group.pairs.local[order]) != 1
    breaks = int(np.count_nonzero(remote | local))
    if not breaks:
        return ""
    who = [
        f"{name}'s block ids break off {_times(int(np.count_nonzero(broken)))}"
        for name, broken in (("P", remote), ("D", local & ~remote))
        if broken.any()
    ]
    return f"{blocks:,} blocks move in {breaks + 1:,} runs a page, since {' and '.join(who)} ({_HISTORY[case.pool]})."


def _sliced(case: HandOver, group: GroupPlan) -> str:
    """Pages that are cut leave room to the next one on one side at least."""
    theirs, mine = (engine.ranks[0].groups[group.index] for engine in (case.prefill, case.decode))
    if theirs.block_size != mine.block_size:
        return (
            f"no two blocks merge: a block holds {theirs.block_size:,} tokens on P and {mine.block_size:,} on D, so "
            "pages move in pieces."
        )
    if theirs.share.count != mine.share.count:
        return (
            f"no two blocks merge: of {mine.share.total} KV heads a rank of P holds {theirs.share.count} and a rank of "
            f"D {mine.share.count}, so pages move in slices."
        )
    return ""


def _gap(case: HandOver, group: GroupPlan) -> str:
    """Pages that leave room to the next block's page never touch it."""
    for engine, name in ((case.prefill, "P"), (case.decode, "D")):
        geometry = engine.ranks[0]
        pages = geometry.groups[group.index].pages
        stride = geometry.regions[pages[0].region].stride
        used = sum(page.num_bytes for page in pages if page.region == pages[0].region)
        if used < stride:
            what = "a state moves without its padding" if group.kind == State() else "the rest belongs to nobody here"
            return (
                f"no two blocks merge: on {name} the group fills {used:,} of the {stride:,} bytes from one block to "
                f"the next ({what})."
            )
    return ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _named(indices: list[int]) -> str:
    """`Group 3`, `Groups 0–5`, `Groups 0, 2`."""
    if len(indices) == 1:
        return f"Group {indices[0]}"
    if indices == list(range(indices[0], indices[-1] + 1)):
        return f"Groups {indices[0]}–{indices[-1]}"
    return f"Groups {', '.join(map(str, indices))}"
