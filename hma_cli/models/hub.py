"""Files of the Hugging Face hub: from its cache on disk, read directly, or over HTTPS. Its own library is not needed.

Environment, as the hub's library reads it: HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME (where the cache is), HF_ENDPOINT,
HF_TOKEN (never shown), HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "on", "yes", "true")
_CONNECT_SECONDS = 3.0
_READ_SECONDS = 5.0
_TOTAL_SECONDS = 15.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_name(model: str) -> bool:
    """Whether `model` looks like `org/name`, and so is safe in a path and in a URL."""
    return _NAME.fullmatch(model) is not None and ".." not in model and "--" not in model


def cache_dir() -> Path:
    """Where the hub's library keeps what it has downloaded."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def cached(name: str, file_name: str) -> Path | None:
    """A file of a model that the cache holds: of the revision that `main` was at, else of the newest one there is."""
    model = cache_dir() / f"models--{name.replace('/', '--')}"
    snapshots = model / "snapshots"
    try:
        revision = (model / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    try:
        if _REVISION.fullmatch(revision) and (snapshots / revision / file_name).is_file():
            return snapshots / revision / file_name
        found = [directory / file_name for directory in snapshots.iterdir() if (directory / file_name).is_file()]
        return max(found, key=lambda file: file.parent.stat().st_mtime, default=None)
    except OSError:
        return None


def fetch(name: str, file_name: str, *, offline: bool, max_bytes: int) -> tuple[bytes | None, str]:
    """A file of a model's main branch, and its URL; or None, and a phrase that says why not.

    Gives up after seconds, not minutes: a hub that cannot be reached is no error here.
    """
    blocked = _blocked(offline)
    if blocked:
        return None, f"not the hub ({blocked})"
    endpoint = (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None, "not the hub (HF_ENDPOINT is not a URL)"
    host = parts.hostname
    import httpx

    url = f"{endpoint}/{name}/resolve/main/{file_name}"
    headers = _headers(secure=parts.scheme == "https" or host in _LOOPBACK)
    try:
        with (
            httpx.Client(
                timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS), follow_redirects=True
            ) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            if response.status_code != 200:
                return None, f"the hub at {host} ({_refusal(response.status_code)})"
            return _read(response.iter_bytes(), host, url, max_bytes)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        return None, f"the hub at {host} (not reachable: {type(error).__name__})"


def _read(chunks: Iterator[bytes], host: str, url: str, max_bytes: int) -> tuple[bytes | None, str]:
    deadline = time.monotonic() + _TOTAL_SECONDS
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > max_bytes:
            return None, f"the hub at {host} (its answer is larger than {max_bytes:,} bytes)"
        if time.monotonic() > deadline:
            return None, f"the hub at {host} (too slow)"
    return bytes(content), url


def _blocked(offline: bool) -> str:
    if offline:
        return "offline was asked for"
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").strip().lower() in _TRUE:
            return f"{variable} is set"
    return ""


def _headers(*, secure: bool) -> dict[str, str]:
    """The token goes only where nobody on the way can read it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token and secure else {}


def _refusal(status: int) -> str:
    match status:
        case 401 | 403:
            return "access needs a token in HF_TOKEN and the licence accepted, or there is no such model"
        case 404:
            return "no such model or no config.json in it"
        case _:
            return f"HTTP status {status}"
