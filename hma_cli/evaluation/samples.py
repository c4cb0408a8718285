"""What an arm of an evaluation leaves behind: one sample a question, scored by lm-eval's filters. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one of the task's filters took from an answer, and whether it is the right number."""

    filter: str
    extracted: str
    correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question's answer.

    doc_id:        the question's position in the set: the key that pairs two arms.
    prompt_ids:    the token ids that were sent.
    token_ids:     the generated ids; None where the server does not return them.
    finish_reason: `stop`, `length`, or None where the request failed.
    error:         why there is no answer; empty when there is one.
    scores:        one for each filter; empty for an arm that failed.
    """

    doc_id: int
    prompt_ids: tuple[int, ...]
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    error: str = ""
    scores: tuple[Score, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.text.strip()

    @property
    def capped(self) -> bool:
        """Ended by the length limit and not by a stop sequence."""
        return self.finish_reason == "length"

    def answer(self, *, by_tokens: bool) -> object:
        """What two arms must have in common."""
        return (self.token_ids, self.text) if by_tokens else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of lm-eval's table. stderr is None where lm-eval gives none (a single sample, for example)."""

    filter: str
    name: str
    value: float
    stderr: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run over all questions. `lm_eval` is lm-eval's own result for its table, None for an arm that failed."""

    name: str
    url: str
    seconds: float
    samples: tuple[Sample, ...]
    metrics: tuple[Metric, ...] = ()
    lm_eval: dict[str, Any] | None = None

    @property
    def errors(self) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.error)

    @property
    def has_tokens(self) -> bool:
        """Whether every answer came with its token ids."""
        return all(sample.token_ids is not None for sample in self.samples if not sample.error)

    def share(self, trait: str) -> float:
        """The share of samples that are `empty` or `capped`, 0 to 1."""
        return sum(bool(getattr(sample, trait)) for sample in self.samples) / max(1, len(self.samples))
