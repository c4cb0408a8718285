"""`hma model list|prepare|path` in each state of the checkpoint. The conversion is pretended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from connector.errors import ModelError
from hma_cli.app import app
from hma_cli.models import embedded, manifest, source


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["model", *words])


def fill(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    manifest.write(
        directory, model=embedded.NAME, recipe=source.RECIPE, source_sha256=source.GGUF_SHA256, versions={"gguf": "1"}
    )


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the checkpoint belongs; `prepare` fills it by a pretended conversion."""
    monkeypatch.setenv("HMA_CACHE_DIR", str(tmp_path))
    path = tmp_path / "models" / embedded.NAME

    def prepare() -> Path:
        fill(path)
        return path

    monkeypatch.setattr(embedded, "prepare", prepare)
    return path


def listed(*words: str) -> Any:
    done = run("list", "--format", "json", *words)
    (entry,) = json.loads(done.stdout)["models"]
    return entry | {"exit": done.exit_code}


def test_list_knows_three_states(target: Path) -> None:
    assert listed() == {
        "name": "gemma-3-270m",
        "title": "Gemma 3 270M (base)",
        "licence": "Gemma Terms of Use (ai.google.dev/gemma/terms)",
        "status": "absent",
        "reason": "",
        "path": str(target),
        "bytes": 0,
        "exit": 0,
    }
    fill(target)
    entry = listed()
    assert (entry["status"], entry["bytes"], entry["exit"]) == ("ready", 2, 0)
    (target / "config.json").write_text("{ }")
    entry = listed()
    assert (entry["status"], entry["reason"], entry["exit"]) == ("damaged", "config.json has 3 bytes instead of 2", 1)


def test_list_is_a_table_with_the_remedy(target: Path) -> None:
    done = run("list")
    assert "absent" in done.stdout
    assert "hma model prepare" in " ".join(done.stdout.split())
    fill(target)
    assert "ready" in run("list").stdout


def test_path_prints_the_directory_alone(target: Path) -> None:
    fill(target)
    assert run("path").stdout == f"{target}\n"
    assert run("path", "--verify").stdout == f"{target}\n"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(None, "is not prepared yet"), (lambda path: path.mkdir(parents=True), "is damaged: its manifest")],
)
def test_path_of_a_model_that_is_not_ready_is_refused(
    target: Path, spoil: Callable[[Path], None] | None, words: str
) -> None:
    if spoil is not None:
        spoil(target)
    done = run("path")
    assert done.stdout == ""
    assert isinstance(done.exception, ModelError)
    assert words in str(done.exception)
    assert "hma model prepare" in done.exception.remedy


def test_prepare_says_whether_it_had_to_work(target: Path) -> None:
    first = " ".join(run("prepare").stdout.split())
    assert "is ready:" in first
    again = run("prepare", "--format", "json")
    entry = json.loads(again.stdout)
    assert entry["schema"] == "hma.model/1"
    assert entry["models"][0]["path"] == str(target)
    assert entry["models"][0]["seconds"] >= 0
    assert "was ready already" in " ".join(run("prepare").stdout.split())
