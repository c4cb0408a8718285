"""The fuzz targets on their seeds, on random bytes, and for a few seconds under atheris."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEEDS, TARGETS

ROOT = Path(__file__).parents[2]
SECONDS = 2


KEPT = [(name, path) for name in TARGETS for path in sorted((SEEDS / name).iterdir())]


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name}" for name, path in KEPT])
def test_seeds(name: str, path: Path) -> None:
    TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_random_bytes(name: str) -> None:
    @given(st.binary(max_size=300))
    @settings(max_examples=150, deadline=None)
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_guided_by_coverage(name: str, tmp_path: Path) -> None:
    """Anything that a target does not expect ends the fuzzer with the input and a traceback."""
    pytest.importorskip("atheris")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz", name, str(tmp_path), str(SEEDS / name)),
            *(f"-max_total_time={SECONDS}", f"-artifact_prefix={tmp_path}/", "-rss_limit_mb=2048", "-timeout=10"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "cov:" in done.stderr, "nothing was covered"
