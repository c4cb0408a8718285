"""scripts/setup without any installation: a pretended Python writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[3] / "scripts" / "setup"
STAMP = Path(".venv") / ".hma-setup"

# Plays python3.11 and, copied into .venv, its python. Answers by its arguments; every pip call goes into pip-calls.
PRETENDED_PYTHON = """#!/bin/bash
case "$*" in
  --version) echo "Python 3.11.9" ;;
  "-c import ensurepip"*) exit 0 ;;
  "-m venv --clear "*)
    venv=${@: -1}
    mkdir -p "$venv/bin"
    cp "$0" "$venv/bin/python"
    echo "#!$venv/bin/python" >"$venv/bin/pip"
    touch "$venv/bin/hma" && chmod +x "$venv/bin/hma"
    echo venv >>"$CALLS" ;;
  "-m pip "*)
    echo "${@:4}" >>"$CALLS"
    [[ " $* " == *" $PIP_FAILS "* ]] && exit 1
    exit 0 ;;
  "-c import importlib.metadata"*nixl-cu13*) exit "${NO_CU13:-0}" ;;
  "-c import importlib.metadata"*) exit 0 ;;
  "-c import torchvision") exit 1 ;;
  "-c import "*) exit 0 ;;
  -) cat >/dev/null; exit "${CHECK:-0}" ;;
esac
"""
INSTALL = "install --quiet --editable .[cpu,dev]"
INSTALL_FROM_PYTORCH = "install --quiet --extra-index-url https://download.pytorch.org/whl/cpu --editable .[cpu,dev]"


class Checkout:
    """A copy of the script beside a pyproject.toml, run with a PATH that holds the pretended Python."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.root = root
        self.programs = programs
        self.log = root / "calls"

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.programs), "CALLS": str(self.log), "PIP_FAILS": "nothing"} | variables
        return subprocess.run(
            [str(self.root / "scripts" / "setup")],
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root, programs = tmp_path / "with a space", tmp_path / "bin"
    (root / "scripts").mkdir(parents=True)
    programs.mkdir()
    shutil.copy(SETUP, root / "scripts" / "setup")
    (root / "pyproject.toml").write_text("[project]\n")
    for tool in ("bash", "env", "dirname", "cat", "sha256sum", "grep", "rm", "mkdir", "cp", "touch", "chmod"):
        found = shutil.which(tool)
        assert found is not None
        (programs / tool).symlink_to(os.path.realpath(found))
    python = programs / "python3.11"
    python.write_text(PRETENDED_PYTHON)
    python.chmod(0o755)
    return Checkout(root, programs)


def test_it_installs_mends_checks_and_marks(checkout: Checkout) -> None:
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert checkout.calls() == [
        "venv",
        "install --quiet --upgrade pip",
        "install --quiet --dry-run --no-deps torch==2.13.0+cpu",
        INSTALL,
        "uninstall --quiet --yes nixl-cu13",
        "uninstall --quiet --yes torchvision",
    ]
    assert (checkout.root / STAMP).is_file()


def test_a_second_run_returns_at_once_until_something_changes(checkout: Checkout) -> None:
    checkout.run()
    before = checkout.calls()
    start = time.monotonic()
    assert checkout.run().returncode == 0
    assert time.monotonic() - start < 2
    assert checkout.calls() == before
    (checkout.root / "pyproject.toml").write_text("[project]\n# changed\n")
    checkout.run()
    assert checkout.calls().count(INSTALL) == 2
    assert checkout.calls().count("venv") == 1


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    moved = checkout.root.rename(tmp_path / "moved")
    elsewhere = Checkout(moved, checkout.programs)
    assert elsewhere.run().returncode == 0
    assert elsewhere.calls().count("venv") == 2


def test_torch_comes_from_its_own_index_where_the_sources_lack_it(checkout: Checkout) -> None:
    done = checkout.run(PIP_FAILS="--dry-run")
    assert done.returncode == 0
    assert INSTALL_FROM_PYTORCH in checkout.calls()
    assert INSTALL not in checkout.calls()
    assert "not in pip's configured sources" in done.stderr


def test_nothing_is_removed_that_is_not_there(checkout: Checkout) -> None:
    checkout.run(NO_CU13="1")
    assert "uninstall --quiet --yes nixl-cu13" not in checkout.calls()


@pytest.mark.parametrize("trouble", [{"PIP_FAILS": "--editable"}, {"PIP_FAILS": "--upgrade"}, {"CHECK": "1"}])
def test_a_failing_step_leaves_no_stamp(checkout: Checkout, trouble: dict[str, str]) -> None:
    checkout.run()
    (checkout.root / "pyproject.toml").write_text("[project]\n# changed\n")
    done = checkout.run(**trouble)
    assert done.returncode == 1
    assert "the next run tries again" in done.stderr
    assert not (checkout.root / STAMP).exists()
    assert checkout.run().returncode == 0
    assert (checkout.root / STAMP).is_file()


def test_no_suitable_python_is_one_sentence(checkout: Checkout) -> None:
    (checkout.programs / "python3.11").unlink()
    done = checkout.run()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "install Python 3.11, 3.12 or 3.13" in done.stderr
