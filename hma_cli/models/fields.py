"""Typed reading of one JSON object of a config.json, with the origin of every value that was used.

What comes out of the file is checked here and trusted afterwards: a wrong type, a number out of range or a missing
field is a ModelError that names the field, says what it is needed for, and what would work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from connector.errors import ModelError
from hma_cli.models.classes import ESSENTIAL, ConfigClass, default_of, installed_default

# Far above any published model, far below what would make the arithmetic slow or meaningless.
MAX_LAYERS = 10_000
MAX_SIZE = 1 << 20
_FILE = "config.json"
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A value that the layers were computed from. origin: `config.json`, `class default of …`, a formula, a rule."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One JSON object. model: what messages call the model. path: of the object in the file, "" for the top.

    used collects what was read, by dotted path, in order of first use; it belongs to the whole config.
    """

    model: str
    values: Mapping[str, object]
    path: str = ""
    config_class: ConfigClass | None = None
    used: dict[str, Used] = field(default_factory=dict, repr=False, compare=False)

    def has(self, key: str) -> bool:
        """Whether the file states the field with a value other than null."""
        return self.values.get(key) is not None

    def states(self, key: str) -> bool:
        """Whether the field is in the file at all, null included."""
        return key in self.values

    def integer(self, key: str, why: str, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """A number that must be there: in the file, or as a class default."""
        value = self._value(key, required=True)
        if value is None:
            raise self.error(key, f"is {'null' if self.states(key) else 'missing'}", why, _range(low, high))
        return self._checked_integer(key, value, why, low, high)

    def optional_integer(self, key: str, why: str, *, low: int = 1, high: int = MAX_SIZE) -> int | None:
        """A number that may be null or absent, which means None."""
        value = self._value(key, required=False)
        return None if value is None else self._checked_integer(key, value, why, low, high)

    def flag(self, key: str, why: str, *, default: bool = False) -> bool:
        """true or false; null counts as absent."""
        value = self._value(key, required=False)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {_shown(value)}", why, "Give true or false.")
        return value

    def word(self, key: str, why: str, choices: Iterable[str]) -> str | None:
        """One of a few words; None where it is null or absent."""
        value = self._value(key, required=False)
        if value is None:
            return None
        allowed = tuple(choices)
        if value not in allowed or not isinstance(value, str):
            raise self.error(key, f"is {_shown(value)}", why, f"Known values: {', '.join(allowed)}.")
        return value

    def text(self, key: str, why: str, *, high: int = MAX_LAYERS) -> str | None:
        """A string of at most `high` characters; None where it is null or absent."""
        value = self._value(key, required=False)
        if value is None:
            return None
        if not isinstance(value, str) or not 1 <= len(value) <= high:
            raise self.error(key, f"is {_shown(value)}", why, f"Give a string of 1 to {high} characters.")
        return value

    def words(self, key: str, why: str, choices: Iterable[str]) -> tuple[str, ...] | None:
        """A list in which every entry is one of a few words; None where it is null or absent."""
        value = self._list(key, why)
        if value is None:
            return None
        allowed = tuple(choices)
        for item in value:
            if not isinstance(item, str) or item not in allowed:
                raise self.error(key, f"has an entry {_shown(item)}", why, f"Known entries: {', '.join(allowed)}.")
        return tuple(str(item) for item in value)

    def integers(self, key: str, why: str, *, low: int = 0, high: int = MAX_SIZE) -> tuple[int, ...] | None:
        """A list of numbers; None where it is null or absent."""
        value = self._list(key, why)
        return None if value is None else tuple(self._checked_integer(key, item, why, low, high) for item in value)

    def section(self, key: str, why: str) -> Fields | None:
        """A nested object; None where it is null or absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {_shown(value)}", why, "Give a JSON object.")
        return Fields(model=self.model, values=value, path=self.at(key), used=self.used)

    def derive(self, key: str, value: int, origin: str) -> int:
        """Record a value that follows from others, such as `hidden_size / num_attention_heads`."""
        self.record(key, value, origin)
        return value

    def record(self, key: str, value: object, origin: str) -> None:
        self.used[self.at(key)] = Used(value=value, origin=origin)

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def error(self, key: str, state: str, why: str, remedy: str) -> ModelError:
        """`state` completes "the field …", `why` completes "it is needed for …"."""
        return ModelError(f"{self.model}: `{self.at(key)}` {state}; it is needed for {why}.", remedy=remedy)

    def _list(self, key: str, why: str) -> list[object] | None:
        value = self._value(key, required=False)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise self.error(key, f"is {_shown(value)}", why, f"Give a list of at most {MAX_LAYERS} entries.")
        return value

    def _value(self, key: str, *, required: bool) -> object:
        """The file's value (null is None), else the class default, else, where it is required, transformers' own."""
        value = self.values.get(key, _ABSENT)
        if value is not _ABSENT:
            self.record(key, value, _FILE)
            return value
        value, origin = self._default(key, required=required)
        if value is not None:
            self.record(key, value, origin)
        return value

    def _default(self, key: str, *, required: bool) -> tuple[object, str]:
        if self.config_class is None or key in ESSENTIAL:
            return None, ""
        known, value = default_of(self.config_class, key)
        if known:
            return value, f"class default of {self.config_class.name}"
        if not required or not self.config_class.in_transformers:
            return None, ""
        return installed_default(self.config_class, key)

    def _checked_integer(self, key: str, value: object, why: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"is {_shown(value)}", why, _range(low, high))
        return value


def _range(low: int, high: int) -> str:
    return f"Give a whole number from {low} to {high} in config.json."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
