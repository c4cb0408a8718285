"""Run one fuzz target under atheris."""

from __future__ import annotations

import sys

import atheris

# Only our own code is watched: instrumenting everything takes minutes.
with atheris.instrument_imports(include=["connector", "tests.fuzz"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name not in TARGETS:
        raise SystemExit(f"no target {name!r}; there are: {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()


main()
