"""One arm: all questions asked of one server, scored by lm-eval. Importing this module loads lm-eval (seconds)."""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lm_eval import evaluator

from hma_cli.evaluation.completions import ArmFailed, Completions
from hma_cli.evaluation.questions import Questions
from hma_cli.evaluation.samples import Arm, Metric, Sample, Score
from hma_cli.evaluation.task import TASK, build_task

_TABLE_KEYS = ("results", "versions", "n-shot", "higher_is_better", "group_subtasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What both arms share. tokenizer: a directory or hub id. max_length: tokens of a prompt and its answer."""

    questions: Questions
    limit: int
    num_fewshot: int
    model: str
    tokenizer: str
    max_length: int
    concurrency: int


def run_arm(name: str, url: str, plan: Plan, *, on_answer: Callable[[Sample], None] | None = None) -> Arm:
    """Ask and score. Failed requests are in the arm's samples; such an arm carries no scores."""
    model = Completions(
        url=url,
        model=plan.model,
        tokenizer=plan.tokenizer,
        max_length=plan.max_length,
        concurrency=plan.concurrency,
        cache_salt=f"hma-verify-{random.SystemRandom().getrandbits(64):016x}",
        on_answer=on_answer,
    )
    started = time.monotonic()
    try:
        results = _evaluate(model, plan)
    except ArmFailed:
        results = None
    seconds = time.monotonic() - started
    samples = tuple(model.answers[doc_id] for doc_id in sorted(model.answers))
    if results is None:
        return Arm(name=name, url=url, seconds=seconds, samples=samples)
    scores = scores_of(results["samples"][TASK])
    return Arm(
        name=name,
        url=url,
        seconds=seconds,
        samples=tuple(replace(sample, scores=scores[sample.doc_id]) for sample in samples),
        metrics=metrics_of(results["results"][TASK]),
        lm_eval={key: results[key] for key in _TABLE_KEYS if key in results},
    )


def _evaluate(model: Completions, plan: Plan) -> dict[str, Any]:
    # lm-eval's own bars go to stderr while the questions are prepared; ours tells about both arms instead.
    with contextlib.redirect_stderr(io.StringIO()):
        task = build_task(plan.questions, num_fewshot=plan.num_fewshot)
        loaded = {"tasks": {TASK: task}, "groups": {}, "group_map": {}}
        results: dict[str, Any] = evaluator.evaluate(lm=model, task_dict=loaded, limit=plan.limit, log_samples=True)
    return results


def scores_of(logged: list[dict[str, Any]]) -> dict[int, tuple[Score, ...]]:
    """lm-eval logs one entry a question and filter: gather them by question."""
    found: dict[int, list[Score]] = {}
    for entry in logged:
        score = Score(
            filter=entry["filter"],
            extracted=str(entry["filtered_resps"][0]),
            correct=bool(entry["exact_match"] == 1),  # lm-eval gives NumPy values
        )
        found.setdefault(int(entry["doc_id"]), []).append(score)
    return {doc_id: tuple(scores) for doc_id, scores in found.items()}


def metrics_of(results: dict[str, Any]) -> tuple[Metric, ...]:
    """lm-eval's keys are `metric,filter` and `metric_stderr,filter`."""
    metrics = []
    for key, value in results.items():
        name, comma, of_filter = key.partition(",")
        if comma and not name.endswith("_stderr"):
            stderr = results.get(f"{name}_stderr,{of_filter}")
            known = float(stderr) if isinstance(stderr, int | float) else None
            metrics.append(Metric(filter=of_filter, name=name, value=float(value), stderr=known))
    return tuple(metrics)
