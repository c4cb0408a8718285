"""Console blocks of the documentation: what follows `$ hma …` is what the command prints.

`python -m tests.docs` writes the blocks anew; tests/unit/test_docs.py fails when one is stale.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
BLOCK = re.compile(r"```console\n\$ (?P<command>hma [^\n]*)\n(?P<output>.*?)```", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(command, documented output) of every console block that runs hma."""
    return [(match["command"], match["output"]) for match in BLOCK.finditer(page.read_text())]


def printed(command: str) -> str:
    """What the command writes to stdout, without spaces at line ends. `| head -N` is understood."""
    command, _, head = command.partition(" | head -")
    done = subprocess.run(
        [sys.executable, "-m", "hma_cli", *shlex.split(command)[1:]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    return "\n".join(lines[: int(head)] if head else lines) + "\n"


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        written = BLOCK.sub(lambda match: f"```console\n$ {match['command']}\n{printed(match['command'])}```", text)
        if written != text:
            page.write_text(written)
            sys.stderr.write(f"{page.relative_to(ROOT)} written\n")


if __name__ == "__main__":
    main()
