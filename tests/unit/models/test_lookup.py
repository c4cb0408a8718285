"""Where a config.json is looked for, in which order, and what is said when there is none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from pathlib import Path

import pytest

from connector.errors import ModelError
from hma_cli.models import catalog, hub, source
from hma_cli.models.lookup import MAX_BYTES, find

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
TOKEN = "hf_a_secret_that_is_never_shown"


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no hub unless a test provides one."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(path: Path, content: object = CONFIG) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refusal(model: str, **options: bool) -> str:
    with pytest.raises(ModelError) as caught:
        find(model, **options)
    return str(caught.value)


# --- paths -----------------------------------------------------------------------------------------------------------


def test_a_file_or_the_directory_that_holds_it(tmp_path: Path) -> None:
    file = write(tmp_path / "my-model" / "config.json")
    for given in (file, file.parent):
        config = find(str(given))
        assert (config.name, config.source) == ("my-model", str(file))
        assert config.values == CONFIG


def test_a_path_comes_before_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "google" / "gemma-3-4b-it" / "config.json")
    monkeypatch.chdir(tmp_path)
    assert find("google/gemma-3-4b-it").architecture == "LlamaForCausalLM"


def test_a_directory_without_a_config_does_not_hide_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gemma-3-4b-it").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find("gemma-3-4b-it").source.startswith("catalog")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00", '{"a": 1' + "0" * 5000 + "}", "[" * 100_000])
def test_a_file_that_is_no_config(tmp_path: Path, content: str) -> None:
    assert str(tmp_path) in refusal(str(write(tmp_path / "config.json", content)))


def test_a_file_of_another_encoding_or_size(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\xfa")
    assert "not JSON" in refusal(str(file))
    with file.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    assert "larger than" in refusal(str(file))


def test_mistrals_own_format_is_recognised(tmp_path: Path) -> None:
    write(tmp_path / "params.json")
    assert "params.json" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["", "\0", "a\0b", "x" * 5000, "../../no/such/file", "~nobody-here/x", "\udcff", "a/b/c", "."]
)
def test_names_that_can_name_nothing(model: str) -> None:
    assert "Looked in" in refusal(model)


# --- the catalog -----------------------------------------------------------------------------------------------------


def test_the_catalog_is_package_data_with_one_file_for_each_model() -> None:
    files = [
        entry.name for entry in resources.files("hma_cli.models.catalog").iterdir() if entry.name.endswith(".json")
    ]
    assert len(files) == len(catalog.names()) == 50
    assert "deepseek-ai/DeepSeek-V3.2" in catalog.names()


@pytest.mark.parametrize("model", ["google/gemma-3-4b-it", "gemma-3-4b-it", "Google/Gemma-3-4B-IT", "GEMMA-3-4b-it"])
def test_names_with_and_without_organisation_and_in_any_case(model: str) -> None:
    assert find(model).name == "google/gemma-3-4b-it"


def test_the_embedded_model_is_in_the_catalog() -> None:
    assert find(source.NAME).name == "google/gemma-3-270m"


def test_what_is_not_certain_about_a_catalog_entry_is_noted() -> None:
    assert find("google/gemma-3-4b-it").notes == ()
    notes = find("Qwen/Qwen3.5-4B").notes
    assert notes[0].startswith("catalog entry derived")
    assert any("mamba_ssm_dtype" in note for note in notes)


def test_loading_one_model_reads_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = Path.read_text

    def counting(self: Path, *args: object, **kwargs: object) -> str:
        read.append(self.name)
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", counting)
    find("gemma-3-4b-it")
    assert read == ["google--gemma-3-4b-it.json"]


def test_a_near_miss_gets_the_nearest_names_and_every_place() -> None:
    message = refusal("google/gemma-3-5b-it")
    for part in ("file system", "catalog of 50 models", "hub's cache", "HF_HUB_OFFLINE", "google/gemma-3-4b-it"):
        assert part in message


# --- the hub's cache -------------------------------------------------------------------------------------------------


def cached(root: Path, revision: str, *, main: str | None) -> Path:
    model = root / "models--org--name"
    if main is not None:
        write(model / "refs" / "main", main)
    return write(model / "snapshots" / revision / "config.json")


def test_the_cache_is_read_without_the_hubs_library(tmp_path: Path) -> None:
    file = cached(tmp_path / "hf" / "hub", "abc123", main="abc123")
    cached(tmp_path / "hf" / "hub", "zzz999", main=None)
    config = find("org/name")
    assert (config.name, config.source) == ("org/name", f"hub cache ({file})")


@pytest.mark.parametrize("main", [None, "gone", "../../..", ""])
def test_a_cache_whose_main_branch_is_gone(tmp_path: Path, main: str | None) -> None:
    cached(tmp_path / "hf" / "hub", "abc123", main=main)
    assert find("org/name").values == CONFIG


def test_another_place_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path / "elsewhere", "abc123", main="abc123")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert find("org/name").values == CONFIG


@pytest.mark.parametrize(
    "name", ["org", "a/b/c", "../x", "org/..", "a/b..c", "org/na me", "org/name?x=1", "a--b/c", "/x"]
)
def test_names_that_are_no_hub_names_reach_neither_the_cache_nor_the_hub(name: str) -> None:
    assert not hub.is_name(name)


# --- the hub ---------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """Answers for a few models and remembers the headers that it got."""

    seen: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        model = self.path.split("/")[2]
        if model == "moved":
            self.send_response(307)
            self.send_header("Location", "/org/there/resolve/main/config.json")
            self.end_headers()
            return
        content = {"there": json.dumps(CONFIG).encode(), "huge": b"1" * (MAX_BYTES + 10), "html": b"<html>"}.get(model)
        self.send_response({"gated": 401, "broken": 500}.get(model, 404) if content is None else 200)
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Hub.seen = []
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_hub_is_asked_last_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(monkeypatch) as url:
        config = find("org/there")
        assert config.source == f"{url}/org/there/resolve/main/config.json"
        assert find("org/moved").values == CONFIG
    assert Hub.seen[0] == ("/org/there/resolve/main/config.json", f"Bearer {TOKEN}")
    assert config.values == CONFIG


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gated", "HF_TOKEN"),
        ("absent", "no such model"),
        ("broken", "500"),
        ("huge", "larger than"),
        ("html", "not JSON"),
    ],
)
def test_what_the_hub_refuses_is_said(monkeypatch: pytest.MonkeyPatch, model: str, reason: str) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(monkeypatch):
        message = refusal(f"org/{model}")
    assert reason in message
    assert TOKEN not in message


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch):
        pass  # its port is closed from here on
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "not reachable" in refusal("org/name")
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    assert "not a URL" in refusal("org/name")


def test_offline_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch):
        assert "offline was asked for" in refusal("org/there", offline=True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "true")
        assert "HF_HUB_OFFLINE" in refusal("org/there")
    assert Hub.seen == []


def test_the_token_is_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub._headers(secure=True) == {"Authorization": f"Bearer {TOKEN}"}
    assert hub._headers(secure=False) == {}


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_a_catalog_model_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from hma_cli.models.lookup import find\n"
        "from hma_cli.models.architectures import layers_of\n"
        "from hma_cli.models.options import RankOptions\n"
        "layers_of(find('gemma-3-4b-it'), RankOptions())\n"
        "heavy = ('vllm', 'torch', 'transformers', 'nixl', 'httpx', 'zmq', 'numpy', 'rich')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
