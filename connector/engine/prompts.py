"""One token early: what P computes, what D loads, and what identifies a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.wire.digest import prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request


def transferable(request: Request) -> bool:
    """Whether a request's KV can be handed over at all.

    Not: one token (nothing is left to load), prompts given as embeddings (nothing identifies them), and a media input
    that ends with the prompt (the last token could not be cut off).
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.num_prompt_tokens < 2:
        return False
    if request.sampling_params is None:
        return False
    last = request.num_prompt_tokens - 1
    return all(feature.mm_position.offset + feature.mm_position.length <= last for feature in request.mm_features)


def computes_whole_prompt(request: Request) -> bool:
    """Whether D must compute every prompt token itself, because log-probabilities of the prompt were asked for."""
    sampling = request.sampling_params
    return request.skip_reading_prefix_cache or (sampling is not None and sampling.prompt_logprobs is not None)


def transfer_digest(request: Request) -> bytes:
    """The digest of the whole prompt, with all that changes its KV: adapter, cache salt, media."""
    assert request.prompt_token_ids is not None
    adapter = request.lora_request
    return prompt_digest(
        request.prompt_token_ids,
        adapter="" if adapter is None else adapter.lora_name,
        salt=request.cache_salt or "",
        media=tuple(
            f"{feature.identifier}@{feature.mm_position.offset}+{feature.mm_position.length}"
            for feature in request.mm_features
        ),
    )


def shorten_prompt(request: Request) -> None:
    """Cut the last prompt token off a request of P, before it is scheduled.

    P then computes exactly the tokens that D loads, and both sides drop exactly what D's next forward pass does not
    read. P's own sampled token is of no use to anyone, so one is enough.
    """
    assert request.prompt_token_ids is not None and request.num_computed_tokens == 0
    # A new list: the old one belongs to the caller, who may live in this process.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    request.block_hashes = []
    request.update_block_hashes()
