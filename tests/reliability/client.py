"""Asks a pair as a router does, and judges every answer by what one engine alone answered."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from tests.reliability.gate import Gate
from tests.reliability.servers import SERVED, Server

Handle = dict[str, Any]
Verdict = Literal["right", "wrong", "failed", "hung", "left"]
HUNG_SECONDS = 90.0
OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with the reference's tokens and log-probabilities."""

    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client got. failed: an HTTP error or a broken connection. left: the client itself went away.

    status: of HTTP, 0 where none came. where: the server that failed.
    """

    verdict: Verdict
    status: int = 0
    seconds: float = 0.0
    where: str = ""
    detail: str = ""

    def __str__(self) -> str:
        if self.verdict == "failed":
            return f"HTTP {self.status}" if self.status else f"connection to {self.where} lost"
        return {"right": "the right answer", "wrong": "200 with wrong tokens", "hung": "no answer", "left": "left"}[
            self.verdict
        ]


def judge(prompt: Prompt, body: dict[str, Any], count: int = OUTPUT, choice: int = 0) -> Verdict:
    """Token ids equal, log-probabilities to three decimals."""
    made = body["choices"][choice]
    got, logprobs = tuple(made["token_ids"]), made["logprobs"]["token_logprobs"]
    if got != prompt.wanted[:count] or len(logprobs) != count:
        return "wrong"
    return "right" if all(abs(a - b) < 5e-4 for a, b in zip(logprobs, prompt.logprobs, strict=False)) else "wrong"


class Client:
    """One client of a pair. gate: handles are led through it, so that the control channel can be cut."""

    def __init__(self, prefill: Server, decode: Server, gate: Gate | None = None) -> None:
        self.prefill_server, self.decode_server, self._gate = prefill, decode, gate
        self._http = httpx.AsyncClient(timeout=HUNG_SECONDS, limits=httpx.Limits(max_connections=64))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(
        self, prompt: Prompt, *, edit: Callable[[Handle], Handle] | None = None, count: int = OUTPUT
    ) -> Answer:
        """Prefill, then decode. edit: changes the handle on its way."""
        started = time.monotonic()
        handle = await self.prefill(prompt)
        if isinstance(handle, Answer):
            return handle
        answer = await self.decode(prompt, edit(handle) if edit else handle, count=count)
        return _timed(answer, started)

    async def prefill(self, prompt: Prompt, **changes: Any) -> Handle | Answer:
        """Send a prompt to the prefill server; its handle, or what went wrong."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = request(prompt.tokens, 1, kv_transfer_params=params, **changes)
        answer = await self._post(self.prefill_server, body)
        if isinstance(answer, Answer):
            return answer
        handle: Handle = answer["kv_transfer_params"] or {}
        if self._gate is not None and handle:
            handle["remote_port"] = self._gate.port
        return handle

    async def decode(self, prompt: Prompt, handle: Handle | None, *, count: int = OUTPUT, **changes: Any) -> Answer:
        """Send a prompt with a handle to the decode server and judge the answer."""
        extra = {"kv_transfer_params": handle} if handle else {}
        started = time.monotonic()
        answer = await self._post(self.decode_server, request(prompt.tokens, count, **extra, **changes))
        if isinstance(answer, Answer):
            return _timed(answer, started)
        return Answer(verdict=judge(prompt, answer, count), status=200, seconds=time.monotonic() - started)

    async def decode_list(self, prompts: Sequence[Prompt], handle: Handle) -> list[Answer]:
        """Several prompts in one request, behind one handle."""
        body = request((), OUTPUT, kv_transfer_params=handle) | {"prompt": [list(p.tokens) for p in prompts]}
        answer = await self._post(self.decode_server, body)
        if isinstance(answer, Answer):
            return [answer] * len(prompts)
        return [Answer(verdict=judge(prompt, answer, choice=index), status=200) for index, prompt in enumerate(prompts)]

    async def prefill_list(self, prompts: Sequence[Prompt]) -> Handle | Answer:
        """Several prompts in one request; the one handle that comes back."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = request((), 1, kv_transfer_params=params) | {"prompt": [list(p.tokens) for p in prompts]}
        answer = await self._post(self.prefill_server, body)
        return answer if isinstance(answer, Answer) else answer["kv_transfer_params"] or {}

    async def _post(self, server: Server, body: dict[str, Any]) -> dict[str, Any] | Answer:
        started = time.monotonic()
        try:
            reply = await self._http.post(f"{server.url}/v1/completions", json=body)
        except httpx.ReadTimeout:
            return Answer(verdict="hung", where=server.name, seconds=time.monotonic() - started)
        except httpx.HTTPError as error:
            return Answer(verdict="failed", where=server.name, detail=type(error).__name__)
        if reply.status_code != 200:
            return Answer(verdict="failed", status=reply.status_code, where=server.name, detail=reply.text[:300])
        made: dict[str, Any] = reply.json()
        return made


def request(tokens: Sequence[int], count: int, **changes: Any) -> dict[str, Any]:
    """The body of a completions request: greedy, `count` tokens, with their ids and log-probabilities."""
    body = {"model": SERVED, "prompt": list(tokens), "max_tokens": count, "temperature": 0, "seed": 0}
    return {**body, "logprobs": 1, "return_token_ids": True, "ignore_eos": True, **changes}


async def make_prompts(reference: Server, lengths: Sequence[int], *, seed: int, vocabulary: int) -> list[Prompt]:
    """Random prompts of these lengths, answered by one engine alone."""
    rng = random.Random(seed)
    made = []
    async with httpx.AsyncClient(timeout=HUNG_SECONDS) as http:
        for length in lengths:
            tokens = tuple(rng.randrange(3, vocabulary) for _ in range(length))
            reply = await http.post(f"{reference.url}/v1/completions", json=request(tokens, OUTPUT))
            reply.raise_for_status()
            choice = reply.json()["choices"][0]
            made.append(Prompt(tokens, tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])))
    return made


def _timed(answer: Answer, started: float) -> Answer:
    return Answer(
        verdict=answer.verdict,
        status=answer.status,
        seconds=time.monotonic() - started,
        where=answer.where,
        detail=answer.detail,
    )
