"""lm-eval's `local-completions` model with a client that hides nothing.

Payloads, stop sequences, seeds and tokens are lm-eval's. The sending is ours, for three reasons: lm-eval's client sends
a failed request up to three times and tells nobody, drops what a server says beside the text (token ids, why it ended),
and adds the EOS text to the stop sequences only when requests go one by one.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from lm_eval.models.openai_completions import LocalCompletionsAPI

from hma_cli.evaluation.samples import Sample

MAX_ERRORS = 5  # after so many failed requests the rest is not sent: the run is invalid, and the server may be gone
_NOT_SENT = "not sent, after too many failed requests"


class ArmFailed(Exception):
    """Requests failed, so there is nothing to score. The samples are in the model's `answers`."""


class Completions(LocalCompletionsAPI):  # type: ignore[misc]
    """One arm's model. `answers` holds a sample for every question that was asked, without scores.

    concurrency: requests in flight. timeout: seconds for one request. cache_salt: keeps the run's prompts apart from
    what earlier runs left in the servers' prefix caches, so that every prompt's KV has to be made and moved anew.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        tokenizer: str,
        max_length: int,
        concurrency: int,
        cache_salt: str,
        timeout: int = 600,
        on_answer: Callable[[Sample], None] | None = None,
    ) -> None:
        super().__init__(
            base_url=f"{url}/v1/completions",
            model=model,
            tokenizer=tokenizer,
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            add_bos_token=True,  # encode with the tokenizer's special tokens, as the server does with a text
            num_concurrent=concurrency,
            batch_size=1,
            max_length=max_length,
            timeout=timeout,
        )
        self._cache_salt = cache_salt
        self._on_answer = on_answer or (lambda _: None)
        self._errors = 0
        self.answers: dict[int, Sample] = {}

    @property
    def output_limit(self) -> int:
        """Tokens an answer may have when the task says nothing."""
        return int(self._max_gen_toks)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Ask everything once. ArmFailed when a request failed: no score is made from an answer that is not one."""
        encoded = self.tok_encode([request.args[0] for request in requests], add_special_tokens=True)
        samples = asyncio.run(self._ask_all(requests, encoded))
        if any(sample.error for sample in samples):
            raise ArmFailed
        return [sample.text for sample in samples]

    async def _ask_all(self, requests: Sequence[Any], encoded: Sequence[list[int]]) -> list[Sample]:
        turn = asyncio.Semaphore(self._concurrent)
        limits = httpx.Limits(max_connections=self._concurrent)
        async with httpx.AsyncClient(timeout=self.timeout, limits=limits, trust_env=False) as client:

            async def ask(request: Any, ids: list[int]) -> Sample:
                async with turn:
                    sample = await self._ask(client, request, ids)
                self.answers[sample.doc_id] = sample
                self._on_answer(sample)
                return sample

            return list(await asyncio.gather(*(ask(*pair) for pair in zip(requests, encoded, strict=True))))

    async def _ask(self, client: httpx.AsyncClient, request: Any, ids: list[int]) -> Sample:
        asked: dict[str, Any] = {"doc_id": int(request.doc_id), "prompt_ids": tuple(ids)}
        if self._errors >= MAX_ERRORS:
            return Sample(**asked, error=_NOT_SENT)
        payload = self._create_payload(
            [ids],
            generate=True,
            gen_kwargs=copy.deepcopy(request.args[1]),
            seed=self._seed,
            eos=self.eos_string,
        )
        # A list with one prompt is a list all the same; a single id prompt cannot be mistaken for several.
        payload |= {"prompt": ids, "return_token_ids": True, "cache_salt": self._cache_salt}
        try:
            response = await client.post(self.base_url, json=payload)
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {response.text.strip()[:300]}")
            return Sample(**asked, **read_choice(response.json(), ids))
        except (httpx.HTTPError, ValueError) as error:
            self._errors += 1
            return Sample(**asked, error=str(error) or type(error).__name__)


def read_choice(answer: Any, ids: Sequence[int]) -> dict[str, Any]:
    """The text, token ids and finish reason of an answer to one prompt. ValueError for anything else.

    >>> read_choice({"choices": [{"text": " 4", "finish_reason": "stop"}]}, [2])
    {'text': ' 4', 'token_ids': None, 'finish_reason': 'stop'}
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("the answer does not hold one completion")
    choice = choices[0]
    text, tokens, reason = choice.get("text"), choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(text, str) or reason is None:
        raise ValueError("the completion has no text or no finish reason")
    if reason not in ("stop", "length"):
        raise ValueError(f"the completion ended with '{reason}'")
    seen = choice.get("prompt_token_ids")
    if isinstance(seen, list) and seen != list(ids):
        raise ValueError(f"the server answered another prompt than was sent (it begins {seen[:8]})")
    return {
        "text": text,
        "token_ids": tuple(tokens) if isinstance(tokens, list) else None,
        "finish_reason": reason,
    }
