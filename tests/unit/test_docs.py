"""The documentation shows what the commands print."""

from __future__ import annotations

import pytest

from tests.docs import PAGES, ROOT, blocks, printed

SHOWN = [(page.relative_to(ROOT), command, output) for page in PAGES for command, output in blocks(page)]


@pytest.mark.parametrize(("page", "command", "output"), SHOWN, ids=[f"{page}: {command}" for page, command, _ in SHOWN])
def test_console_blocks_are_what_the_command_prints(page: str, command: str, output: str) -> None:
    assert output == printed(command), f"stale in {page}; write it anew with: python -m tests.docs"


def test_there_are_blocks_to_check() -> None:
    assert len(SHOWN) >= 2
