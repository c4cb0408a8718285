"""Finding a model's config.json: a path, the bundled catalog, the hub's cache on disk, the hub, in this order."""

from __future__ import annotations

import json
import re
from pathlib import Path

from connector.errors import ModelError
from hma_cli.models import catalog, hub
from hma_cli.models.config import ModelConfig, parse

FILE_NAME = "config.json"
MAX_BYTES = 8 << 20  # the largest published ones are some hundred kilobytes

_LOOKS_LIKE_A_PATH = re.compile(r"^[~./\\]|\.json$")


def find(model: str, *, offline: bool = False) -> ModelConfig:
    """The config of a model: a path to a config.json or to a directory with one, or a model's name.

    offline: never ask the hub, as with HF_HUB_OFFLINE=1. ModelError where nothing is found, with every place that was
    looked in, and where the file that was found cannot be read: the search ends with the first file.
    """
    looked: list[str] = []
    config = _from_path(model, looked)
    if config is None and not _LOOKS_LIKE_A_PATH.search(model):
        config = _from_catalog(model, looked) or _from_hub(model, looked, offline=offline)
    if config is not None:
        return config
    near = catalog.nearest(model)
    hint = f"Did you mean {' or '.join(near)}? Otherwise give" if near else "Give"
    raise ModelError(
        f"No config.json was found for {_shown(model)}. Looked in: {'; '.join(looked)}.",
        remedy=f"{hint} the path of a checkpoint's config.json, or a name as on the hub (org/name).",
    )


def _from_path(model: str, looked: list[str]) -> ModelConfig | None:
    try:
        path = Path(model).expanduser()
        file = path / FILE_NAME if path.is_dir() else path
        if model and file.is_file():
            return parse(_decode(_read(file), str(file)), name=_name_of(path), source=str(file))
        if path.is_dir() and model and (path / "params.json").is_file():
            looked.append(f"the directory {path} (params.json only, which is Mistral's own format)")
        elif path.is_dir() and model:
            looked.append(f"the directory {path} (without a config.json)")
        else:
            looked.append("the file system (no such path)")
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, a home directory that does not exist
        looked.append("the file system (no such path)")
    return None


def _from_catalog(model: str, looked: list[str]) -> ModelConfig | None:
    name = catalog.resolve(model)
    if name is None:
        looked.append(f"the catalog of {len(catalog.names())} models")
        return None
    return catalog.load(name)


def _from_hub(model: str, looked: list[str], *, offline: bool) -> ModelConfig | None:
    if not hub.is_name(model):
        looked.append("not on the hub, whose names look like org/name")
        return None
    file = hub.cached(model, FILE_NAME)
    if file is not None:
        return parse(_decode(_read(file), str(file)), name=model, source=f"hub cache ({file})")
    looked.append(f"the hub's cache ({hub.cache_dir()})")
    content, outcome = hub.fetch(model, FILE_NAME, offline=offline, max_bytes=MAX_BYTES)
    if content is None:
        looked.append(outcome)
        return None
    return parse(_decode(content, outcome), name=model, source=outcome)


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read: {error.strerror or error}.", remedy="Check its permissions."
        ) from error
    if len(content) > MAX_BYTES:
        raise ModelError(
            f"{file} is larger than {MAX_BYTES:,} bytes, so it is no config.json.",
            remedy="Give the path of the config.json, not of the weights.",
        )
    return content


def _decode(content: bytes, source: str) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of thousands of digits
        detail = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ModelError(
            f"{source} is not JSON ({detail}).", remedy="Give the config.json of a Hugging Face checkpoint."
        ) from error


def _name_of(path: Path) -> str:
    """What to call a model that was given by its path: the checkpoint directory's name."""
    directory = path.parent if path.name == FILE_NAME else path
    return directory.resolve().name.removesuffix(".json") or str(path)


def _shown(model: str) -> str:
    return repr(model) if len(model) <= 120 else f"{model[:100]!r}…"
