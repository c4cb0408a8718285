"""lm-eval's own gsm8k task, asked over questions that are already in memory.

Prompts, few-shot sampling, filters (`strict-match`, `flexible-extract`) and the metric are those of the installed
lm-eval: its YAML is read from the package and only the source of the documents is replaced, so no network is needed
and lm-eval's score means what it always means.
"""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

from connector.errors import StackError
from hma_cli.evaluation.questions import Question, Questions

TASK = "gsm8k"
OUTPUT_TOKENS = 256  # lm-eval's limit for an answer where the task sets none
FEWSHOT_SEED = 1234  # lm-eval's default: both arms, and a run of lm-eval itself, draw the same examples


def quiet() -> None:
    """lm-eval tells each step at INFO or WARNING; only its errors are for our readers."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def build_task(questions: Questions, *, num_fewshot: int) -> Any:
    """A fresh lm-eval task: it keeps the answers of a run, so each arm needs its own. StackError without lm-eval."""
    try:
        import datasets
        from lm_eval import tasks
    except ImportError as error:
        raise StackError(
            f"lm-eval cannot be imported: {error}.", remedy="Install the extra: pip install 'hma[cpu]'."
        ) from error
    quiet()

    def documents(**_: Any) -> dict[str, Any]:
        return {
            split: datasets.Dataset.from_list([_document(item) for item in items])
            for split, items in (("train", questions.train), ("test", questions.test))
        }

    # Scanning only this task's folder takes milliseconds; all of lm-eval's tasks take up to 20 seconds.
    folder = Path(tasks.__file__).parent / TASK
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    entry = manager.task_index.get(TASK)
    if entry is None or not entry.cfg:
        raise StackError(f"The installed lm-eval has no task {TASK}.", remedy="Install lm-eval 0.4.13.")
    task = manager.load([{**entry.cfg, "custom_dataset": documents}])["tasks"][TASK]
    task.set_config(key="num_fewshot", value=num_fewshot)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return task


def prompts(task: Any, *, limit: int) -> tuple[str, ...]:
    """The prompts of the first `limit` questions, in order. Builds the task's requests as lm-eval's evaluator does."""
    with contextlib.redirect_stderr(io.StringIO()):  # lm-eval draws a bar of its own
        task.build_all_requests(limit=limit, rank=0, world_size=1)
    return tuple(instance.args[0] for instance in sorted(task.instances, key=lambda instance: instance.doc_id))


def _document(item: Question) -> dict[str, str]:
    return {"question": item.question, "answer": item.answer}
