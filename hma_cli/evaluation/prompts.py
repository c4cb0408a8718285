"""The prompts as token ids, and the marks at their beginning. Pure apart from the tokenizer that is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connector.errors import ConfigError, ModelError

SHOWN = 8  # ids of the first prompt that the report shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The texts of the prompts and their ids, in the order of the questions. bos_id: None where the model has none.

    needs_bos: whether the model's answers are worthless without BOS, as Gemma's are.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    bos_id: int | None
    needs_bos: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ids) for ids in self.ids)

    @property
    def first_ids(self) -> tuple[int, ...]:
        return self.ids[0][:SHOWN]

    @property
    def bos_problem(self) -> str:
        """What is wrong with the prompts' BOS tokens; empty where nothing is.

        >>> Prompts(texts=("a",), ids=((2, 2, 7),), bos_id=2).bos_problem
        'prompt 0 carries BOS (id 2) 2 times'
        """
        if self.bos_id is None:
            return ""
        for index, ids in enumerate(self.ids):
            count = ids.count(self.bos_id)
            if count > 1:
                return f"prompt {index} carries BOS (id {self.bos_id}) {count} times"
            if count == 0 and self.needs_bos:
                return f"prompt {index} carries no BOS (id {self.bos_id}), without which this model cannot answer"
            if count == 1 and ids[0] != self.bos_id:
                return f"prompt {index} carries BOS (id {self.bos_id}) in the middle instead of at its start"
        return ""

    @property
    def bos_count(self) -> int:
        """BOS tokens in the first prompt."""
        return 0 if self.bos_id is None else self.ids[0].count(self.bos_id)

    def check_length(self, *, output: int, max_model_len: int, where: str) -> None:
        """ConfigError when a prompt and its answer do not fit: lm-eval would cut BOS and the first examples off."""
        if self.longest + output > max_model_len:
            raise ConfigError(
                f"The longest prompt has {self.longest} tokens and an answer may have {output}, "
                f"but {where} takes {max_model_len} together.",
                remedy="Give a smaller --num-fewshot, or serve with a larger --max-model-len.",
            )


def encode(tokenizer: Any, texts: Sequence[str]) -> Prompts:
    """Encode as a server would encode the texts: with the tokenizer's own special tokens."""
    ids = tokenizer(list(texts), add_special_tokens=True, return_attention_mask=False).input_ids
    name = f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')}".lower()
    return Prompts(
        texts=tuple(texts),
        ids=tuple(tuple(one) for one in ids),
        bos_id=tokenizer.bos_token_id,
        needs_bos="gemma" in name,
    )


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a model directory or hub id. ModelError in one sentence."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        # Missing files, unreachable hubs and broken JSON arrive as errors of several libraries.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"The tokenizer of {source} cannot be loaded: {first}",
            remedy="Give --model with a directory that holds the served model's tokenizer.",
        ) from error
