"""BOS exactly once, and servers that are told by URL: all of them, and of the right kind."""

from __future__ import annotations

import pytest

from connector.errors import ConfigError
from hma_cli.commands.verify import running_urls
from hma_cli.evaluation.preflight import base_url
from hma_cli.evaluation.prompts import Prompts


@pytest.mark.parametrize(
    ("ids", "needs", "problem"),
    [
        ((2, 5, 6), True, ""),
        ((5, 6), False, ""),
        ((5, 6), True, "no BOS"),
        ((2, 2, 5), False, "2 times"),
        ((5, 2), False, "in the middle"),
    ],
)
def test_bos(ids: tuple[int, ...], needs: bool, problem: str) -> None:
    found = Prompts(texts=("a",), ids=(ids,), bos_id=2, needs_bos=needs).bos_problem
    assert problem in found if problem else found == ""


def test_a_prompt_that_does_not_fit_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="3 tokens and an answer may have 256"):
        Prompts(texts=("a",), ids=((2, 5, 6),), bos_id=2).check_length(output=256, max_model_len=258, where="it")


def test_a_chat_url_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="chat URL"):
        base_url("http://h:1/v1/chat/completions", "--pair")
    assert base_url("http://h:1/v1", "--pair") == "http://h:1"
    with pytest.raises(ConfigError, match="not an HTTP URL"):
        base_url("h:1", "--pair")


def test_all_four_urls_or_none() -> None:
    assert running_urls(pair=None, baseline=None, prefill=None, decode=None) is None
    with pytest.raises(ConfigError, match="without --baseline and --decode"):
        running_urls(pair="http://h:1", baseline=None, prefill="http://h:2", decode=None)
    urls = running_urls(pair="http://h:1", baseline="http://h:2", prefill="http://h:3", decode="http://h:4/v1")
    assert urls is not None
    assert urls.decode == "http://h:4"
