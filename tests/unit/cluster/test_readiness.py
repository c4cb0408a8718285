"""Stages and plain lines from vLLM's log, and following a log while it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hma_cli.cluster.readiness import LogFollower, Stage, plain, stage_of

PREFIX = "(Worker pid=4520) INFO 12-01 05:37:37 "


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (
            "(APIServer pid=1) INFO 12-01 05:37:00 [api_utils.py:286] non-default args: {'model': 'x'}",
            Stage.CONFIGURING,
        ),
        ("(APIServer pid=1) INFO 12-01 05:37:13 [model.py:733] Resolved architecture: Gemma3", Stage.CONFIGURING),
        ("[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: HmaNixlConnector", Stage.ENGINE),
        (PREFIX + "[cpu_model_runner.py:68] Starting to load model /m...", Stage.LOADING),
        ("Loading safetensors checkpoint shards: 100% Completed | 1/1", Stage.LOADING),
        (PREFIX + "[cpu_model_runner.py:87] Warming up model for the compilation...", Stage.WARMING),
        (PREFIX + "[kv_cache_utils.py:2327] CPU KV cache size: 690,065 tokens", Stage.KV_CACHE),
        ("2026-12-01 05:38:18 NIXL INFO    _api.py:281 Initialized NIXL agent: 2b4a", Stage.CONNECTOR),
        ("INFO:     Application startup complete.", Stage.SERVING),
        ('INFO:     127.0.0.1:44750 - "GET /health HTTP/1.1" 200 OK', None),
        ("Enforce eager set, disabling torch.compile", None),
    ],
)
def test_stage_of_a_line(line: str, stage: Stage | None) -> None:
    assert stage_of(line) is stage


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (PREFIX + "[loader.py:501] Loading weights took 0.01 seconds", "Loading weights took 0.01 seconds"),
        ("(EngineCore pid=1) ValueError: no", "ValueError: no"),
        ("(EngineCore pid=1) ERROR 12-01 05:37:24 [core.py:72] Traceback", "Traceback"),
        ("just text", "just text"),
        ("", ""),
    ],
)
def test_plain_lines(line: str, expected: str) -> None:
    assert plain(line) == expected


def test_every_stage_has_a_text() -> None:
    assert all(stage.text for stage in Stage)


def test_a_follower_gives_each_complete_line_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    assert follower.new_lines() == ()
    log.write_bytes(b"one\n\ntw")
    assert follower.new_lines() == ("one",)
    with log.open("ab") as stream:
        stream.write(b"o\r50%\r100%\nthree")
    assert follower.new_lines() == ("two", "50%", "100%")
    assert follower.new_lines() == ()
