"""Checks of the servers that a run is told to use, before the first question is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from connector.errors import ConfigError, PeerUnreachable

_TIMEOUT = 30.0
_FIRST_ANSWER = 180.0  # a cold engine may compile before its first token


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a vLLM server says of itself. root: where it loaded the model from. max_model_len: tokens, 0 if untold."""

    url: str
    name: str
    root: str
    max_model_len: int


def base_url(url: str, option: str) -> str:
    """A server's base URL from what a person gave: `/v1` and `/v1/completions` are taken off.

    >>> base_url("http://127.0.0.1:8000/v1/completions/", "--pair")
    'http://127.0.0.1:8000'
    """
    trimmed = url.strip().rstrip("/")
    parts = urlsplit(trimmed)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{option} {url} is not an HTTP URL.", remedy="Give it like http://127.0.0.1:8000.")
    if "/chat" in parts.path:
        raise ConfigError(
            f"{option} {url} is a chat URL; gsm8k asks for plain completions.",
            remedy=f"Give the server's base URL: {parts.scheme}://{parts.netloc}.",
        )
    for suffix in ("/v1/completions", "/v1"):
        trimmed = trimmed.removesuffix(suffix)
    return trimmed


def served_model(url: str, option: str) -> Served:
    """Ask /v1/models. PeerUnreachable or ConfigError where there is no such server."""
    answer = _request("GET", f"{url}/v1/models", option)
    if answer.status_code != 200:
        raise _not_completions(url, option, f"/v1/models answers HTTP {answer.status_code}")
    try:
        entry = answer.json()["data"][0]
        return Served(
            url=url,
            name=str(entry["id"]),
            root=str(entry.get("root") or entry["id"]),
            max_model_len=int(entry.get("max_model_len") or 0),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _not_completions(url, option, "/v1/models lists no model") from error


def check_same(servers: dict[str, Served]) -> None:
    """ConfigError unless all servers serve one model under one name."""
    (first_option, first), *others = servers.items()
    for option, other in others:
        if other.name != first.name:
            raise ConfigError(
                f"{first_option} and {option} do not serve the same model, so their answers cannot be compared.",
                ours=first.name,
                theirs=other.name,
                remedy="Start both with the same --model (and the same --served-model-name).",
            )


def check_completions(url: str, option: str, model: str, token: int) -> None:
    """One token in, one token out: ConfigError where /v1/completions does not answer so."""
    body = {"model": model, "prompt": [token], "max_tokens": 1, "temperature": 0}
    answer = _request("POST", f"{url}/v1/completions", option, json=body, timeout=_FIRST_ANSWER)
    if answer.status_code != 200:
        what = answer.text.strip()[:200]
        raise _not_completions(url, option, f"/v1/completions answers HTTP {answer.status_code}: {what}")
    try:
        text = answer.json()["choices"][0]["text"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _not_completions(url, option, "/v1/completions gives no completion") from error
    if not isinstance(text, str):
        raise _not_completions(url, option, "/v1/completions gives no text")


def server_ids(url: str, option: str, model: str, text: str) -> tuple[int, ...] | None:
    """A text prompt's ids as the server encodes it; None where it has no /tokenize."""
    answer = _request("POST", f"{url}/tokenize", option, json={"model": model, "prompt": text})
    if answer.status_code != 200:
        return None
    try:
        return tuple(int(token) for token in answer.json()["tokens"])
    except (ValueError, KeyError, TypeError):
        return None


def _request(method: str, url: str, option: str, *, timeout: float = _TIMEOUT, json: Any = None) -> Any:
    import httpx

    try:
        return httpx.request(method, url, json=json, timeout=timeout, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PeerUnreachable(
            f"{option}: {url} does not answer: {str(error) or type(error).__name__}.",
            remedy="Check that the server is up and that the address is right.",
        ) from error


def _not_completions(url: str, option: str, why: str) -> ConfigError:
    return ConfigError(
        f"{option} {url} is not a completions server: {why}.",
        remedy="Give the base URL of a vLLM server or router, like http://127.0.0.1:8000.",
    )
