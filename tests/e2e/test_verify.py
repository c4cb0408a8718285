"""`hma verify gsm8k` on the embedded model: launches both arms by itself, two questions each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hma_cli.evaluation.questions import load

pytestmark = pytest.mark.e2e

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def test_the_pairs_answers_are_the_single_engines_and_the_kv_moved_as_planned(tmp_path: Path) -> None:
    code = "import sys; from hma_cli.app import main; main()"
    arguments = ["verify", "gsm8k", "--limit", "2", "--format", "json", "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["schema"] == "hma.verify/1"
    assert (report["verdict"], report["identical"], report["total"]) == ("equal", 2, 2)
    assert report["compared_by"] == "token ids"
    moved = report["moved"]
    assert moved["bytes_moved"] == moved["bytes_planned"] > 0
    assert (moved["transfers"], moved["claims_granted"], moved["fallbacks"]) == (2, 2, {})
    assert report["prompts"]["bos_count"] == 1
    assert report["prompts"]["server_encodes_alike"] == {"baseline": True, "pair": True}
    for arm in ("baseline", "pair"):
        assert len(report["arms"][arm]["metrics"]) == 2
        samples = (tmp_path / "out" / f"samples-{arm}.jsonl").read_text().splitlines()
        assert len(samples) == 2
        assert all(json.loads(line)["token_ids"] for line in samples)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the original question set is not beside the project")
def test_the_original_set_is_read_from_a_directory() -> None:
    questions = load(str(GSM8K))
    assert len(questions.test) == 1319
    questions.check(limit=1319, num_fewshot=5)
