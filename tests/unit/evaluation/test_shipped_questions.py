"""The shipped set is GSM8K's format, and its arithmetic is right."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest

from connector.errors import ConfigError
from hma_cli.evaluation.questions import Question, load, read_jsonl

SHIPPED = load("shipped")
ALL = [*SHIPPED.train, *SHIPPED.test]


def evaluate(expression: str) -> Fraction:
    """An arithmetic expression of numbers, + - * / and brackets, exactly."""
    assert re.fullmatch(r"[\d.+\-*/() ]+", expression), expression
    exact = re.sub(r"\d+(?:\.\d+)?", lambda number: f"Fraction('{number.group()}')", expression)
    return Fraction(eval(exact, {"__builtins__": {}, "Fraction": Fraction}))


def test_there_are_enough_questions_and_no_two_are_alike() -> None:
    assert len(SHIPPED.test) >= 40
    assert len(SHIPPED.train) >= 10
    assert len({item.question for item in ALL}) == len(ALL)


@pytest.mark.parametrize("item", ALL, ids=lambda item: item.question[:40])
def test_every_annotation_is_right_and_the_last_line_follows_from_it(item: Question) -> None:
    steps = re.findall(r"<<(.+?)=([\d.]+)>>", item.answer)
    assert steps
    for expression, result in steps:
        assert abs(evaluate(expression) - Fraction(result)) < Fraction(1, 10**9), (expression, result)
    final = item.answer.rsplit("#### ", 1)[1].replace(",", "")
    last = evaluate(steps[-1][0])  # two questions ask for whole rounds or boxes
    assert Fraction(final) in (last, math.floor(last), math.ceil(last))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: this is not JSON"),
        ('{"question": "a"}', "line 2: an object with the texts"),
        ('{"question": "a", "answer": "5"}', "line 2: the answer has no line '#### <number>'"),
        ("[]", "line 2: an object with the texts"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line: str, told: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_jsonl(path)


def test_a_missing_directory_and_a_missing_file_are_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="There is no directory"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        load(str(tmp_path))


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="--limit 51"):
        SHIPPED.check(limit=51, num_fewshot=5)
    with pytest.raises(ConfigError, match="--num-fewshot 99"):
        SHIPPED.check(limit=1, num_fewshot=99)
