"""Equal, different or invalid: what a run may conclude from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from hma_cli.cluster.metrics import read_metrics
from hma_cli.evaluation.evidence import Evidence, evidence_of
from hma_cli.evaluation.samples import Arm, Metric, Sample, Score
from hma_cli.evaluation.verdict import judge

GOOD = Evidence(connector="hma", bytes_moved=800, bytes_planned=800, transfers=2, claims_granted=2)


def arm(name: str, *answers: str, tokens: bool = True, value: float = 0.5) -> Arm:
    samples = tuple(
        Sample(
            doc_id=i,
            prompt_ids=(2, 10 + i),
            text=text,
            token_ids=tuple(map(ord, text)) if tokens else None,
            finish_reason="stop",
            scores=(Score(filter="strict-match", extracted=text, correct=text == "4"),),
        )
        for i, text in enumerate(answers)
    )
    metric = Metric(filter="strict-match", name="exact_match", value=value, stderr=0.1)
    return Arm(name=name, url="http://x", seconds=1.0, samples=samples, metrics=(metric,), lm_eval={})


def test_identical_answers_from_kv_that_moved_are_equal() -> None:
    verdict = judge(arm("baseline", "4", "5"), arm("pair", "4", "5"), GOOD)
    assert (verdict.outcome, verdict.identical, verdict.compared_by) == ("equal", 2, "token ids")


def test_another_answer_is_different_and_named_with_its_flip() -> None:
    verdict = judge(arm("baseline", "4", "5"), arm("pair", "4", "58"), GOOD)
    assert verdict.outcome == "different"
    assert [(one.doc_id, one.position) for one in verdict.differences] == [(1, 1)]
    flipped = judge(arm("baseline", "4", "4"), arm("pair", "4", "7"), GOOD)
    assert flipped.flips[0].only_baseline == (1,)


def test_without_token_ids_the_text_decides_and_the_verdict_says_so() -> None:
    verdict = judge(arm("baseline", "4", "5", tokens=False), arm("pair", "4", "5"), GOOD)
    assert (verdict.outcome, verdict.compared_by) == ("equal", "text")


def test_scores_near_zero_have_no_power() -> None:
    assert judge(arm("baseline", "1", "2", value=0.0), arm("pair", "1", "2", value=0.0), GOOD).powerless


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bytes_moved": 0, "bytes_planned": 0, "transfers": 0, "claims_granted": 0}, "no KV moved"),
        ({"bytes_moved": 799}, "799 bytes moved where the plans have 800"),
        ({"claims_granted": 1}, "granted 1 claims where 2 requests"),
        ({"transfers": 1}, "1 transfers were completed"),
        ({"claims_refused": {"digest": 1}}, "refused 1 claim"),
        ({"fallbacks": {"timeout": 1}}, "timeout"),
        ({"leases_expired": 1}, "1 lease"),
        ({"failed_transfers": 1}, "1 transfer(s) failed"),
        ({"restarted": True}, "restarted"),
    ],
)
def test_a_run_whose_kv_did_not_move_as_planned_is_invalid_however_alike_the_answers(
    change: dict[str, object], told: str
) -> None:
    verdict = judge(arm("baseline", "4", "5"), arm("pair", "4", "5"), replace(GOOD, **change))  # type: ignore[arg-type]
    assert verdict.outcome == "invalid"
    assert any(told in reason for reason in verdict.reasons), verdict.reasons


def test_a_failed_request_is_invalid_not_a_wrong_answer() -> None:
    broken = arm("pair", "4", "5")
    broken = replace(broken, samples=(broken.samples[0], Sample(doc_id=1, prompt_ids=(2, 11), error="HTTP 500")))
    verdict = judge(arm("baseline", "4", "5"), broken, GOOD)
    assert verdict.outcome == "invalid"
    assert "HTTP 500" in verdict.reasons[0]


def test_other_prompts_or_a_bos_problem_are_invalid() -> None:
    other = replace(arm("pair", "4"), samples=(replace(arm("pair", "4").samples[0], prompt_ids=(9,)),))
    assert judge(arm("baseline", "4"), other, GOOD).outcome == "invalid"
    assert judge(arm("baseline", "4", "5"), arm("pair", "4", "5"), GOOD, bos_problem="BOS twice").outcome == "invalid"


def test_evidence_is_read_from_both_sides_counters() -> None:
    d = read_metrics(
        'vllm:hma_bytes_moved_total{engine="0"} 10\nvllm:hma_bytes_planned_total{engine="0"} 12\n'
        'vllm:hma_transfers_total{engine="0"} 1\n'
        'vllm:hma_fallbacks_total{engine="0",reason="digest",outcome="recomputed"} 3\n'
    )
    p = read_metrics(
        'vllm:hma_claims_granted_total{engine="0"} 1\nvllm:hma_claims_refused_total{engine="0",reason="digest"} 3\n'
    )
    found = evidence_of("hma", p, d)
    assert (found.bytes_moved, found.bytes_planned, found.transfers, found.claims_granted) == (10, 12, 1, 1)
    assert (found.fallbacks, found.claims_refused) == ({"digest": 3}, {"digest": 3})


def test_scores_are_plain_values_that_json_takes() -> None:
    import numpy as np

    from hma_cli.evaluation.arm import scores_of

    logged = [
        {"doc_id": 3, "filter": name, "filtered_resps": ["4"], "exact_match": np.float64(1.0)} for name in ("a", "b")
    ]
    scores = scores_of(logged)[3]
    assert json.loads(json.dumps([asdict(score) for score in scores])) == [
        {"filter": "a", "extracted": "4", "correct": True},
        {"filter": "b", "extracted": "4", "correct": True},
    ]
