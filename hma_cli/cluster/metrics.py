"""Counters from Prometheus text, summed or by label. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Counters:
    """Samples by (name, labels)."""

    samples: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    def total(self, name: str) -> float:
        """The sum over all label sets; 0 where there is no such sample."""
        return sum(value for (known, _), value in self.samples.items() if known == name)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Nonzero sums for each value of one label."""
        sums: dict[str, float] = {}
        for (known, labels), value in self.samples.items():
            if known == name and value:
                key = dict(labels).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def label(self, name: str, label: str) -> str | None:
        """A label's value on the first sample of that name (for `*_info` metrics)."""
        return next((dict(labels).get(label) for known, labels in self.samples if known == name), None)


def read_metrics(text: str) -> Counters:
    """Parse an exposition; several servers' texts may be joined, equal samples add up. Other lines are ignored.

    >>> read_metrics('bytes_total{engine="0"} 12.0').total("bytes_total")
    12.0
    """
    samples: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        if line.startswith("#") or (match := _SAMPLE.match(line)) is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        key = (match["name"], frozenset(_LABEL.findall(match["labels"] or "")))
        samples[key] = samples.get(key, 0.0) + value
    return Counters(samples)


def difference(before: Counters, after: Counters) -> Counters:
    """What was added between two readings."""
    return Counters({key: value - before.samples.get(key, 0.0) for key, value in after.samples.items()})
