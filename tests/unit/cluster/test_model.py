"""Models are found, measured, or refused in one sentence before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from connector.errors import ModelError
from hma_cli.cluster.model import Model, resolve_model


def directory(path: Path, config: object, **files: int) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, size in files.items():
        (path / name.replace("__", ".")).write_bytes(b"x" * size)
    return path


def test_a_local_directory_is_named_after_itself_and_measured(tmp_path: Path) -> None:
    config = {
        "vocab_size": 1000,
        "sliding_window": 64,
        "max_position_embeddings": 2048,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    path = directory(tmp_path / "tiny", config, model__safetensors=300, tokenizer__json=5)
    model = resolve_model(str(path))
    assert model == Model(
        name="tiny",
        source=str(path),
        vocab_size=1000,
        window=64,
        weight_bytes=300,
        max_positions=2048,
        windowed_layers=5,
        layers=6,
    )


def test_a_multimodal_configuration_is_read_in_its_text_part(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", {"text_config": {"vocab_size": 7, "attention_chunk_size": 128}})
    model = resolve_model(str(path))
    assert (model.vocab_size, model.window, model.has_tokenizer) == (7, 128, False)


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", "not JSON"), ("[]", "not a JSON object"), ({"hidden_size": 3}, "no vocab_size")],
)
def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(str(directory(tmp_path / "m", config)))


def test_paths_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="There is no directory"):
        resolve_model(str(tmp_path / "none"))
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ModelError, match="not a directory"):
        resolve_model(str(file))


def test_an_unreadable_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    path = directory(tmp_path / "m", {"vocab_size": 7})
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ModelError, match=r"cannot be read: Permission denied\."):
        resolve_model(str(path))


@pytest.mark.parametrize("name", ["two words", "a b/c", "-x"])
def test_what_cannot_be_a_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="neither a directory nor a hub id"):
        resolve_model(name)


def test_an_unknown_hub_id_offline_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    import subprocess
    import sys

    program = "from hma_cli.cluster.model import resolve_model; resolve_model('nobody/nothing')"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "ModelError: nobody/nothing is neither a directory nor in the local cache" in done.stderr


@pytest.mark.parametrize(("windowed", "layers", "expected"), [(0, 18, 1.0), (15, 18, 5.6), (18, 18, 64.0)])
def test_the_cost_of_a_cache_without_hma(windowed: int, layers: int, expected: float) -> None:
    model = Model(name="", source="", vocab_size=1, window=512, weight_bytes=0, windowed_layers=windowed, layers=layers)
    assert round(model.cost_without_hma(32768), 1) == expected
