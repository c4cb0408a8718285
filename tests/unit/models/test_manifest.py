"""A manifest notices every change of its files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hma_cli.models import manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 1000}')
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    manifest.write(directory, model="m", recipe=3, source_sha256="ab", versions={"gguf": "1"})
    return directory


def damage(directory: Path, *, full: bool) -> str:
    found = manifest.read(directory)
    assert found is not None
    return manifest.damage(directory, found, full=full)


def test_what_was_written_is_read_again(checkpoint: Path) -> None:
    found = manifest.read(checkpoint)
    assert found is not None
    assert (found.model, found.recipe, found.source_sha256, found.versions) == ("m", 3, "ab", {"gguf": "1"})
    assert [file.name for file in found.files] == ["config.json", "model.safetensors"]
    assert found.total_bytes == 20 + 256 * 64


@pytest.mark.parametrize("full", [False, True])
def test_untouched_files_are_intact(checkpoint: Path, full: bool) -> None:
    assert damage(checkpoint, full=full) == ""


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def flip_a_byte_and_keep_the_time(path: Path) -> None:
    before = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "full", "reason"),
    [
        (Path.unlink, False, "is missing"),
        (truncate, False, "has 100 bytes instead of 16,384"),
        (flip_a_byte, False, "another checksum"),
        (flip_a_byte_and_keep_the_time, True, "another checksum"),
        (replace_by_a_directory, False, "bytes instead of"),
    ],
)
def test_a_change_is_named(checkpoint: Path, change: Callable[[Path], None], full: bool, reason: str) -> None:
    change(checkpoint / "model.safetensors")
    found = damage(checkpoint, full=full)
    assert found.startswith("model.safetensors ")
    assert reason in found


def test_a_copied_cache_with_new_times_is_intact(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy, copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert damage(copy, full=False) == ""


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b"\xff\xfe", b'{"model": 1}', b'{"model": "m", "recipe": 1, "files": "x"}']
)
def test_a_manifest_that_is_not_one_is_none(checkpoint: Path, content: bytes | None) -> None:
    path = checkpoint / manifest.FILE_NAME
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert manifest.read(checkpoint) is None
