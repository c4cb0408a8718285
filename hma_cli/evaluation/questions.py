"""Question sets in GSM8K's format: the shipped one, a directory of JSON lines, or the original from the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from connector.errors import ConfigError

SHIPPED = "shipped"
HUB = "hub"
HUB_ID = "openai/gsm8k"
_SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One problem and its worked answer, which ends in a line `#### <number>`."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """train: worked examples that prompts may show. test: what is asked. source: where they are from, for people."""

    source: str
    train: tuple[Question, ...]
    test: tuple[Question, ...]

    def check(self, *, limit: int, num_fewshot: int) -> None:
        """ConfigError unless there are `limit` questions and `num_fewshot` examples."""
        if limit > len(self.test):
            raise ConfigError(
                f"--limit {limit} asks for more questions than there are: {self.source} has {len(self.test)}.",
                remedy=f"Give --limit {len(self.test)} or less, or another --dataset.",
            )
        if num_fewshot > len(self.train):
            raise ConfigError(
                f"--num-fewshot {num_fewshot} asks for more examples than there are: "
                f"{self.source} has {len(self.train)}.",
                remedy=f"Give --num-fewshot {len(self.train)} or less, or another --dataset.",
            )


def load(where: str) -> Questions:
    """`shipped`, `hub`, or a directory with train.jsonl and test.jsonl. ConfigError in one sentence."""
    if where == SHIPPED:
        data = Path(str(files("hma_cli.evaluation") / "data"))
        return _from_directory(data, "the shipped set")
    if where == HUB:
        return _from_hub()
    directory = Path(where).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"There is no directory {where}.",
            remedy="Give --dataset shipped, hub, or a directory with train.jsonl and test.jsonl.",
        )
    return _from_directory(directory, str(directory))


def read_jsonl(path: Path) -> tuple[Question, ...]:
    """Read one file; blank lines are skipped. ConfigError names the file and the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no {path.name} in {path.parent}.",
            remedy="A data set is a directory with train.jsonl (worked examples) and test.jsonl (questions).",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", remedy="Give a readable UTF-8 file.") from error
    # Split at "\n" only: str.splitlines would also cut at separators that JSON strings may hold.
    lines = enumerate(text.split("\n"), start=1)
    questions = tuple(_question(line, f"{path}, line {number}") for number, line in lines if line.strip())
    if not questions:
        raise ConfigError(f"{path} holds no questions.", remedy='Each line is {"question": ..., "answer": ...}.')
    return questions


def _from_directory(directory: Path, source: str) -> Questions:
    train, test = (read_jsonl(directory / f"{split}.jsonl") for split in _SPLITS)
    return Questions(source=source, train=train, test=test)


def _question(line: str, place: str) -> Question:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: this is not JSON ({error.msg}).", remedy="Mend or remove the line.") from error
    texts = (value.get("question"), value.get("answer")) if isinstance(value, dict) else (None, None)
    question, answer = texts
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip() or not answer.strip():
        raise ConfigError(
            f"{place}: an object with the texts 'question' and 'answer' is needed.", remedy="Mend or remove the line."
        )
    if "####" not in answer:
        raise ConfigError(
            f"{place}: the answer has no line '#### <number>', so nothing could be scored against it.",
            remedy="Mend or remove the line.",
        )
    return Question(question=question, answer=answer)


def _from_hub() -> Questions:
    """The original set. Whatever keeps the hub from answering is one ConfigError before anything is launched."""
    import datasets

    try:
        loaded = datasets.load_dataset(HUB_ID, "main")
        train, test = (
            tuple(Question(question=row["question"], answer=row["answer"]) for row in loaded[split])
            for split in _SPLITS
        )
    except Exception as error:
        # Proxies, offline mode, HTTP and cache errors come from half a dozen libraries with no common base.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"The hub does not give out {HUB_ID}: {first}",
            remedy="Use --dataset shipped (no network), or a directory with train.jsonl and test.jsonl.",
        ) from error
    return Questions(source=f"{HUB_ID} from the hub", train=train, test=test)
