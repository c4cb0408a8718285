"""The outcome of a run as a Result: lm-eval's tables, what was equal, what moved, the verdict. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hma_cli.evaluation.arm import Plan
from hma_cli.evaluation.evidence import Evidence
from hma_cli.evaluation.prompts import Prompts
from hma_cli.evaluation.samples import Arm
from hma_cli.evaluation.task import TASK
from hma_cli.evaluation.verdict import TRAITS, Verdict
from hma_cli.report.result import Exit, Finding, Result, Table

SCHEMA = "hma.verify/1"
NAMED = 5  # differing questions that are named one by one
_LM_EVAL_HEADS = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything a finished run knows. server_ids: by server, whether it encodes the first prompt's text as we did;
    None where it cannot be asked."""

    plan: Plan
    prompts: Prompts
    server_ids: dict[str, bool | None]
    baseline: Arm
    pair: Arm
    evidence: Evidence
    verdict: Verdict


def result_of(run: Run) -> Result:
    """The report. Exit 0 only for equal answers and KV that moved as planned."""
    tables = [_lm_eval_table(arm) for arm in (run.baseline, run.pair) if arm.lm_eval is not None]
    return Result(
        schema=SCHEMA,
        data=_data(run),
        tables=(*tables, _answers_table(run), _moved_table(run.evidence)),
        findings=(*_notes(run), *_verdict_findings(run)),
        exit_code=Exit.OK if run.verdict.ok else Exit.CHECK_FAILED,
    )


def sample_lines(arm: Arm) -> list[dict[str, Any]]:
    """The arm's samples, JSON-ready, one object a question."""
    return [asdict(sample) for sample in arm.samples]


def _data(run: Run) -> dict[str, Any]:
    plan, verdict, prompts = run.plan, run.verdict, run.prompts
    return {
        "task": TASK,
        "model": plan.model,
        "tokenizer": plan.tokenizer,
        "dataset": plan.questions.source,
        "limit": plan.limit,
        "num_fewshot": plan.num_fewshot,
        "concurrency": plan.concurrency,
        "verdict": verdict.outcome,
        "reasons": list(verdict.reasons),
        "identical": verdict.identical,
        "total": verdict.total,
        "compared_by": verdict.compared_by,
        "differences": [asdict(difference) for difference in verdict.differences],
        "flips": [asdict(flips) for flips in verdict.flips],
        "powerless": verdict.powerless,
        "moved": asdict(run.evidence),
        "prompts": {
            "first_ids": list(prompts.first_ids),
            "bos_id": prompts.bos_id,
            "bos_count": prompts.bos_count,
            "longest": prompts.longest,
            "server_encodes_alike": run.server_ids,
        },
        "arms": {arm.name: _arm_data(arm) for arm in (run.baseline, run.pair)},
    }


def _arm_data(arm: Arm) -> dict[str, Any]:
    return {
        "url": arm.url,
        "seconds": round(arm.seconds, 2),
        "errors": [{"doc_id": sample.doc_id, "error": sample.error} for sample in arm.errors],
        "metrics": [asdict(metric) for metric in arm.metrics],
        **{f"{trait}_share": round(arm.share(trait), 4) for trait in TRAITS},
    }


def _lm_eval_table(arm: Arm) -> Table:
    """The columns and the values of lm-eval's own table."""
    known = arm.lm_eval or {}
    version, shots = known.get("versions", {}).get(TASK, "N/A"), known.get("n-shot", {}).get(TASK, "")
    arrow = "↑" if known.get("higher_is_better", {}).get(TASK, {}).get("exact_match", True) else "↓"
    rows = [
        (
            TASK,
            str(version),
            metric.filter,
            str(shots),
            metric.name,
            arrow,
            f"{metric.value:.4f}",
            "±",
            "N/A" if metric.stderr is None else f"{metric.stderr:.4f}",
        )
        for metric in arm.metrics
    ]
    return Table(
        title=f"lm-eval, {arm.name} ({arm.url}, {arm.seconds:.0f} s)", columns=_LM_EVAL_HEADS, rows=tuple(rows)
    )


def _answers_table(run: Run) -> Table:
    verdict = run.verdict
    rows: list[tuple[object, ...]] = [
        (f"identical answers, by {verdict.compared_by}", f"{verdict.identical}/{verdict.total}"),
    ]
    for flips in verdict.flips:
        only = f"{len(flips.only_baseline)} only right in the baseline, {len(flips.only_pair)} only in the pair"
        rows.append((f"score flips, {flips.filter}", only))
    for trait, text in (("empty", "empty answers"), ("capped", "answers cut at the length limit")):
        shares = [f"{arm.name} {round(arm.share(trait) * len(arm.samples))}" for arm in (run.baseline, run.pair)]
        rows.append((text, ", ".join(shares)))
    return Table(title="Answers", columns=("", "questions"), rows=tuple(rows))


def _moved_table(moved: Evidence) -> Table:
    def number(value: int | None) -> str:
        return "–" if value is None else f"{value:,}"

    def reasons(counts: dict[str, int]) -> str:
        return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "0"

    rows = (
        ("bytes planned", number(moved.bytes_planned)),
        ("bytes moved", number(moved.bytes_moved)),
        ("descriptors planned", number(moved.descriptors_planned)),
        ("descriptors posted, after merging", number(moved.descriptors_posted)),
        ("transfers", number(moved.transfers)),
        ("claims granted", number(moved.claims_granted)),
        ("claims refused", reasons(moved.claims_refused)),
        ("fallbacks", reasons(moved.fallbacks)),
        ("failed transfers", number(moved.failed_transfers)),
        ("retries", number(moved.retries)),
        ("leases expired", number(moved.leases_expired)),
    )
    return Table(title=f"From prefill to decode (connector {moved.connector})", columns=("", "run"), rows=rows)


def _notes(run: Run) -> list[Finding]:
    prompts = run.prompts
    found = [
        Finding(
            level="note",
            text=f"First prompt: {len(prompts.ids[0])} tokens {_ids(prompts)}, BOS "
            + (
                "has no id in this model."
                if prompts.bos_id is None
                else f"(id {prompts.bos_id}) {prompts.bos_count} time(s)."
            ),
        )
    ]
    other = [server for server, alike in run.server_ids.items() if alike is False]
    if other:
        found.append(
            Finding(
                level="warning",
                text=f"{' and '.join(other)} encode the first prompt's text to other ids than were sent.",
                remedy="Texts and ids are then different prompts: compare the tokenizer of --model with the server's.",
            )
        )
    for trait, text in (("empty", "empty answers"), ("capped", "answers cut at the length limit")):
        ours, theirs = run.baseline.share(trait), run.pair.share(trait)
        if ours != theirs and not (run.baseline.errors or run.pair.errors):
            found.append(
                Finding(level="warning", text=f"The share of {text} differs: baseline {ours:.0%}, pair {theirs:.0%}.")
            )
    if run.evidence.retries:
        found.append(Finding(level="warning", text=f"{run.evidence.retries} part(s) of transfers had to be retried."))
    if run.verdict.powerless:
        found.append(
            Finding(
                level="note",
                text="Both arms score near zero, so the scores prove nothing: "
                f"the verdict rests on the answers' {run.verdict.compared_by}.",
            )
        )
    return found


def _verdict_findings(run: Run) -> list[Finding]:
    verdict = run.verdict
    if verdict.outcome == "invalid":
        return [
            *(Finding(level="problem", text=reason[0].upper() + reason[1:]) for reason in verdict.reasons),
            Finding(
                level="problem",
                text="INVALID: this run says nothing about the pair, whatever the answers are.",
                remedy="Mend the causes above and run it again.",
            ),
        ]
    if verdict.outcome == "different":
        named = [
            Finding(
                level="problem",
                text=f"Question {one.doc_id} differs from {verdict.compared_by.removesuffix(' ids')} {one.position}: "
                f"baseline …{one.baseline!r}, pair …{one.pair!r}.",
            )
            for one in verdict.differences[:NAMED]
        ]
        docs = ", ".join(str(one.doc_id) for one in verdict.differences)
        text = f"DIFFERENT: {len(verdict.differences)} of {verdict.total} answers differ (questions {docs})."
        return [*named, Finding(level="problem", text=text, remedy="See both answers with --output DIR.")]
    return [
        Finding(
            level="ok",
            text=f"EQUAL: all {verdict.total} answers of the pair are the single engine's, by {verdict.compared_by}, "
            f"and {run.evidence.bytes_moved:,} bytes of KV moved"
            + (", exactly as planned." if run.evidence.bytes_planned is not None else "."),
        )
    ]


def _ids(prompts: Prompts) -> str:
    return (
        "["
        + ", ".join(map(str, prompts.first_ids))
        + ("" if len(prompts.ids[0]) <= len(prompts.first_ids) else ", …")
        + "]"
    )
