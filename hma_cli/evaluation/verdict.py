"""Two arms and what moved between them -> equal, different or invalid. Pure.

`invalid` comes before everything else: a run in which requests failed or the KV did not move as planned says nothing
about the pair, however alike the answers are, since a decode server that computes every prompt again answers correctly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hma_cli.evaluation.evidence import Evidence
from hma_cli.evaluation.samples import Arm, Sample

Outcome = Literal["equal", "different", "invalid"]
TRAITS = ("empty", "capped")
POWERLESS = 0.05  # below this accuracy in both arms, equal scores are what any two broken engines would have


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A question that the arms answer differently. position: of the first differing token, or character for texts."""

    doc_id: int
    position: int
    baseline: str
    pair: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """Questions whose score differs, for one filter: doc ids that only one arm got right."""

    filter: str
    only_baseline: tuple[int, ...]
    only_pair: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """reasons: why it is invalid; empty otherwise. compared_by: `token ids`, or `text` where a server hides its ids."""

    outcome: Outcome
    reasons: tuple[str, ...]
    total: int
    identical: int
    compared_by: Literal["token ids", "text"]
    differences: tuple[Difference, ...]
    flips: tuple[Flips, ...]
    powerless: bool

    @property
    def ok(self) -> bool:
        return self.outcome == "equal"


def judge(baseline: Arm, pair: Arm, evidence: Evidence, *, bos_problem: str = "") -> Verdict:
    """Pair the samples by question and decide.

    bos_problem: what is wrong with the BOS tokens of the prompts; it makes the scores of both arms worthless.
    """
    reasons = (*_arm_reasons(baseline, pair), *evidence_reasons(evidence, requests=len(pair.samples)))
    if bos_problem:
        reasons = (*reasons, f"{bos_problem}.")
    answered = _pairs(baseline, pair)
    by_tokens = baseline.has_tokens and pair.has_tokens
    differences = tuple(
        _difference(ours, theirs, by_tokens=by_tokens)
        for ours, theirs in answered
        if ours.answer(by_tokens=by_tokens) != theirs.answer(by_tokens=by_tokens)
    )
    outcome: Outcome = "invalid" if reasons else "different" if differences else "equal"
    accuracies = [metric.value for arm in (baseline, pair) for metric in arm.metrics]
    return Verdict(
        outcome=outcome,
        reasons=reasons,
        total=len(pair.samples),
        identical=len(answered) - len(differences),
        compared_by="token ids" if by_tokens else "text",
        differences=differences,
        flips=_flips(answered),
        powerless=bool(accuracies) and max(accuracies) <= POWERLESS,
    )


def evidence_reasons(evidence: Evidence, *, requests: int) -> tuple[str, ...]:
    """Why these counters do not prove that `requests` prompts went from prefill to decode as planned."""
    found = [
        "a server's counters went backwards: it was restarted during the run." if evidence.restarted else "",
        "no KV moved from prefill to decode: decode computed every prompt itself." if evidence.bytes_moved <= 0 else "",
        *_planned(evidence),
        *_claims(evidence, requests),
        *(f"decode did not use the KV of {count} request(s): {why}." for why, count in evidence.fallbacks.items()),
        f"{evidence.failed_transfers} transfer(s) failed." if evidence.failed_transfers else "",
        f"{evidence.leases_expired} lease(s) expired during the run." if evidence.leases_expired else "",
    ]
    return tuple(reason for reason in found if reason)


def _planned(evidence: Evidence) -> list[str]:
    planned, moved = evidence.bytes_planned, evidence.bytes_moved
    if planned is None or planned == moved:
        return []
    return [f"{moved:,} bytes moved where the plans have {planned:,}."]


def _claims(evidence: Evidence, requests: int) -> list[str]:
    refused = [f"prefill refused {count} claim(s): {reason}." for reason, count in evidence.claims_refused.items()]
    granted = evidence.claims_granted
    if granted is not None and granted != requests:
        refused.insert(0, f"prefill granted {granted} claims where {requests} requests were sent.")
    if evidence.transfers != requests:
        refused.append(f"{evidence.transfers} transfers were completed where {requests} requests were sent.")
    return refused


def _arm_reasons(baseline: Arm, pair: Arm) -> list[str]:
    reasons = []
    for arm in (baseline, pair):
        if arm.errors:
            first = arm.errors[0]
            reasons.append(
                f"{len(arm.errors)} of {len(arm.samples)} requests of the {arm.name} arm failed; "
                f"question {first.doc_id}: {first.error}"
            )
    asked = [tuple((sample.doc_id, sample.prompt_ids) for sample in arm.samples) for arm in (baseline, pair)]
    if asked[0] != asked[1] or not asked[0]:
        reasons.append("the two arms were not asked the same prompts.")
    return reasons


def _pairs(baseline: Arm, pair: Arm) -> list[tuple[Sample, Sample]]:
    """Samples of both arms by question, where both have an answer."""
    theirs = {sample.doc_id: sample for sample in pair.samples if not sample.error}
    return [
        (sample, theirs[sample.doc_id]) for sample in baseline.samples if not sample.error and sample.doc_id in theirs
    ]


def _difference(ours: Sample, theirs: Sample, *, by_tokens: bool) -> Difference:
    left, right = (ours.token_ids or (), theirs.token_ids or ()) if by_tokens else (ours.text, theirs.text)
    shared = min(len(left), len(right))
    position = next((index for index in range(shared) if left[index] != right[index]), shared)
    start = next((i for i, (a, b) in enumerate(zip(ours.text, theirs.text, strict=False)) if a != b), 0)
    window = slice(max(0, start - 12), start + 28)
    return Difference(doc_id=ours.doc_id, position=position, baseline=ours.text[window], pair=theirs.text[window])


def _flips(answered: list[tuple[Sample, Sample]]) -> tuple[Flips, ...]:
    sides: dict[str, tuple[list[int], list[int]]] = {}
    for ours, theirs in answered:
        for score, other in zip(ours.scores, theirs.scores, strict=False):
            only_baseline, only_pair = sides.setdefault(score.filter, ([], []))
            if score.correct and not other.correct:
                only_baseline.append(ours.doc_id)
            elif other.correct and not score.correct:
                only_pair.append(ours.doc_id)
    return tuple(
        Flips(filter=name, only_baseline=tuple(left), only_pair=tuple(right)) for name, (left, right) in sides.items()
    )
