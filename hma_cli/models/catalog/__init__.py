"""The bundled catalog: config.json of published models, trimmed to what decides the cache. One file for each model.

    {"model": "org/name", "confidence": "verbatim", "not_found": [...], "class_defaults": {...}, "config": {...}}

`config` keeps Hugging Face's own keys. verbatim: the values were read in a quoted or copied config.json. derived: at
least one needed value comes from class defaults, a model card or a table. not_found: facts that were not seen.
class_defaults documents what the class fills in; the reader knows these by itself (classes.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from hma_cli.models.config import ModelConfig, parse

_SUFFIX = ".json"
_SEPARATOR = "--"


def names() -> tuple[str, ...]:
    """All models of the catalog, `org/name`, in order."""
    files = (entry.name for entry in _directory().iterdir() if entry.name.endswith(_SUFFIX))
    return tuple(sorted(name.removesuffix(_SUFFIX).replace(_SEPARATOR, "/", 1) for name in files))


def resolve(model: str) -> str | None:
    """The catalog's full name of a model, or None where it has no such model.

    Case does not matter, and the organisation may be left out where that leaves one model.
    """
    known = names()
    wanted = model.casefold()
    full = {name.casefold(): name for name in known}
    if wanted in full:
        return full[wanted]
    matches = [name for name in known if name.partition("/")[2].casefold() == wanted]
    return matches[0] if len(matches) == 1 else None


def load(name: str) -> ModelConfig:
    """A model of the catalog by its full name. KeyError for any other name."""
    if name not in names():
        raise KeyError(name)
    entry = json.loads(_directory().joinpath(name.replace("/", _SEPARATOR) + _SUFFIX).read_text(encoding="utf-8"))
    notes = tuple(f"not seen in the published config.json: {fact}" for fact in entry.get("not_found", ()))
    if entry["confidence"] == "derived":
        notes = ("catalog entry derived from secondary sources: a detail may differ from the published file", *notes)
    return parse(entry["config"], name=name, source=f"catalog ({entry['confidence']})", notes=notes)


def nearest(model: str) -> tuple[str, ...]:
    """Up to three names of the catalog that look like `model`."""
    from difflib import get_close_matches

    spellings = {}
    for name in names():
        spellings[name.casefold()] = name
        spellings.setdefault(name.partition("/")[2].casefold(), name)
    found = get_close_matches(model.casefold(), spellings, n=3, cutoff=0.6)
    return tuple(dict.fromkeys(spellings[spelling] for spelling in found))


def _directory() -> Path:
    return Path(__file__).parent
