"""The embedded model's life: absent, converted, reused, damaged, converted again. The conversion is pretended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from connector.errors import ModelError, ResourceError, StackError
from hma_cli.models import convert, embedded, manifest

# Stands in for `python -m hma_cli.models.convert`: the same words on stdout, two small files, in no time.
PRETENDED_CONVERSION = """
import pathlib, sys, time
directory, log = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
with log.open("a") as file:
    file.write("converted\\n")
for stage in ("assemble", "verify", "weights", "tokenizer", "save"):
    print("stage", stage, flush=True)
print("a library's chatter", flush=True)
(directory / "config.json").write_text("{}")
(directory / "model.safetensors").write_bytes(bytes(5000))
"""
FAILING = "import sys; print('stage assemble'); sys.exit('ValueError: the GGUF file is not one.')"
KILLED = "import os; os.kill(os.getpid(), 9)"


class Cache:
    """A cache directory and a count of the conversions that ran in it."""

    def __init__(self, root: Path) -> None:
        self.models = root / "cache" / "models"
        self.target = self.models / embedded.NAME
        self.log = root / "conversions"

    @property
    def conversions(self) -> int:
        return self.log.read_text().count("converted") if self.log.exists() else 0

    def listed(self) -> set[str]:
        return {path.name for path in self.models.iterdir()}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Choose the program that stands in for the conversion."""

    def choose(program: str) -> None:
        def command(directory: Path) -> tuple[str, ...]:
            return (sys.executable, "-c", program, str(directory), str(tmp_path / "conversions"))

        monkeypatch.setattr(embedded, "conversion_command", command)

    return choose


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: Any) -> Cache:
    monkeypatch.setenv("HMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "find_spec", lambda _name: object())
    monkeypatch.setattr(embedded.metadata, "version", lambda _name: "1.0")
    use(PRETENDED_CONVERSION)
    return Cache(tmp_path)


def test_first_use_converts_and_later_use_does_not(cache: Cache) -> None:
    assert embedded.path() is None
    assert embedded.inspect().status == "absent"
    assert embedded.prepare(progress=False) == cache.target
    assert embedded.path() == cache.target
    assert embedded.prepare(progress=False) == cache.target
    assert cache.conversions == 1
    assert cache.listed() == {embedded.NAME, f".{embedded.NAME}.lock"}
    state = embedded.inspect(full=True)
    assert (state.status, state.total_bytes) == ("ready", 5002)


def test_stages_are_told_in_order_without_a_terminal(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    embedded.prepare()
    captured = capsys.readouterr()
    assert captured.out == ""
    told = [line.split(": ")[1].split(" ")[0] for line in captured.err.splitlines()]
    assert told == ["assemble", "verify", "weights", "tokenizer", "save", "checksum"]
    assert cache.conversions == 1


def test_nothing_is_told_without_progress(cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    embedded.prepare(progress=False)
    assert capfd.readouterr() == ("", "")
    assert cache.conversions == 1


def test_a_truncated_file_is_converted_again_with_a_note(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    embedded.prepare(progress=False)
    os.truncate(cache.target / "model.safetensors", 10)
    assert embedded.path() is None
    assert embedded.inspect().reason == "model.safetensors has 10 bytes instead of 5,000"
    embedded.prepare()
    assert "has 10 bytes instead of 5,000; converting it again" in capsys.readouterr().err.replace("\n", " ")
    assert cache.conversions == 2
    assert embedded.path() == cache.target


def test_a_flipped_byte_with_the_old_time_is_found_by_prepare(cache: Cache) -> None:
    embedded.prepare(progress=False)
    weights = cache.target / "model.safetensors"
    before = weights.stat()
    weights.write_bytes(bytes(4999) + b"\x01")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert embedded.inspect().status == "ready"  # the quick look cannot see it
    assert embedded.inspect(full=True).status == "damaged"
    embedded.prepare(progress=False)
    assert weights.read_bytes() == bytes(5000)
    assert cache.conversions == 2


def test_a_directory_without_a_manifest_or_of_an_older_recipe_is_converted_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.prepare(progress=False)
    (cache.target / manifest.FILE_NAME).unlink()
    assert embedded.inspect().status == "damaged"
    embedded.prepare(progress=False)
    monkeypatch.setattr(embedded.source, "RECIPE", embedded.source.RECIPE + 1)
    assert embedded.inspect().reason == "another version of hma converted it"
    embedded.prepare(progress=False)
    assert cache.conversions == 3
    assert embedded.path() == cache.target


@pytest.mark.parametrize(
    ("program", "sentence"),
    [(FAILING, "could not be converted: ValueError: the GGUF file is not one."), (KILLED, "process was killed")],
)
def test_a_failed_conversion_is_one_sentence_and_leaves_only_its_log(
    cache: Cache, use: Any, program: str, sentence: str
) -> None:
    use(program)
    with pytest.raises(ModelError, match=sentence) as caught:
        embedded.prepare(progress=False)
    log = cache.models / f"{embedded.NAME}.log"
    assert str(log) in caught.value.remedy
    assert cache.listed() == {f".{embedded.NAME}.lock", log.name}
    use(PRETENDED_CONVERSION)
    embedded.prepare(progress=False)
    assert not log.exists()


def test_a_conversion_without_end_is_killed_at_its_deadline(
    cache: Cache, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("import time; time.sleep(60)")
    monkeypatch.setattr(embedded, "_DEADLINE", 0.5)
    with pytest.raises(ModelError, match="deadline"):
        embedded.prepare(progress=False)
    assert embedded.inspect().status == "absent"
    assert cache.conversions == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_no_child_outlives_an_interrupted_prepare(cache: Cache, sent: signal.Signals) -> None:
    """The child is the real module's main, with a conversion that never ends; Ctrl-C also leaves no files."""
    child = (
        "import sys, time; from hma_cli.models import convert\n"
        "def endless(d): (d / 'half').write_text(''); print('stage weights', flush=True); time.sleep(60)\n"
        "convert.convert = endless\n"
        "convert.main()"
    )
    program = (
        "import sys; from hma_cli.models import embedded\n"
        "embedded.find_spec = lambda name: name\n"
        f"embedded.conversion_command = lambda d: (sys.executable, '-c', {child!r}, str(d))\n"
        "embedded.prepare()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with parent:
        assert parent.stderr is not None
        assert "weights" in parent.stderr.readline()
        assert len(cache.listed()) == 3
        parent.send_signal(sent)
        parent.stderr.read()  # its end: nobody holds it any more
        parent.wait(timeout=20)
    allowed = {f".{embedded.NAME}.lock"} | ({f"{embedded.NAME}.log"} if sent == signal.SIGKILL else set())
    deadline = time.monotonic() + 10
    while cache.listed() - allowed and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cache.listed() <= allowed
    embedded.prepare(progress=False)  # the lock is free
    assert cache.conversions == 1


def test_missing_packages_are_named_with_the_remedy(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None if name in {"gguf", "torch"} else object())
    with pytest.raises(StackError, match="not installed: torch, gguf") as caught:
        embedded.prepare(progress=False)
    assert "pip install 'hma[cpu]'" in caught.value.remedy
    assert not cache.models.exists()


def test_a_full_disk_is_refused_before_the_conversion(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(ResourceError, match="GB free") as caught:
        embedded.prepare(progress=False)
    assert "HMA_CACHE_DIR" in caught.value.remedy
    assert cache.conversions == 0
    assert cache.listed() == {f".{embedded.NAME}.lock"}


def test_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    blocked = cache.log.parent / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("HMA_CACHE_DIR", str(blocked))
    with pytest.raises(ResourceError, match="cannot be written"):
        embedded.prepare(progress=False)


def test_the_cache_directory_follows_the_variable_and_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HMA_CACHE_DIR", "/somewhere")
    assert embedded.cache_dir() == Path("/somewhere")
    monkeypatch.setenv("HMA_CACHE_DIR", " ")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert embedded.cache_dir() == Path("/elsewhere/hma")


class Tokenizer:
    """Answers "Hello" with fixed ids."""

    bos_token_id = 2

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def __call__(self, _text: str) -> dict[str, tuple[int, ...]]:
        return {"input_ids": self.ids}


def test_bos_must_stand_in_front_exactly_once() -> None:
    convert.check_bos(Tokenizer(2, 9259))
    for ids in ((9259,), (2, 2, 9259), (9259, 2), ()):
        with pytest.raises(ValueError, match="BOS"):
            convert.check_bos(Tokenizer(*ids))
