"""The real embedded model in the user's cache, converted by this test where that has not been done yet."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hma_cli.models import embedded
from hma_cli.models.convert import check_bos, check_dense

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return embedded.prepare()


def test_it_is_a_dense_hybrid_checkpoint(checkpoint: Path) -> None:
    check_dense(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["sliding_window"] == 512
    assert Counter(config["layer_types"]) == {"sliding_attention": 15, "full_attention": 3}


def test_its_tokenizer_puts_bos_in_front_once(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    check_bos(AutoTokenizer.from_pretrained(checkpoint))


def test_it_completes_text_sensibly(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = tokenizer("one two three four five six seven", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(ids[0]).endswith(" eight nine ten")
