"""All faults of `faults`, one after the other, for our connector and for vLLM's own, in one run.

`python -m tests.reliability.table` prints what came of each; `--write` puts the tables into docs/reliability.md. With
`--rows FILE` every row is kept as it comes, and a run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from hma_cli.cluster.ports import Ports
from tests.models import GEMMA3_VOCAB, tiny_gemma3
from tests.reliability.client import Client, Prompt, make_prompts
from tests.reliability.faults import FAULTS, HEALTHY, Fault, Row, World, observe
from tests.reliability.gate import Gate
from tests.reliability.servers import Server, Setup, serving

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- tables: scripts/faults --write -->", "<!-- end of tables -->"
# Lengths at which both connectors answer rightly when nothing goes wrong, and those at which the window's edge is met.
LENGTHS = (60, 100, 150, 210, 300, 420, 530, 640, 710, 840, 905, 1000)
EDGES = (95, 127, 191, 223)
NAMES = {"hma": "HmaNixlConnector", "nixl": "NixlConnector (in vLLM)"}


async def reference_prompts(setup: Setup, ports: Ports) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of both kinds, answered by one engine without a connector."""
    alone = Server("reference", Setup(model=setup.model, log_dir=setup.log_dir, connector=None), core=0, ports=ports)
    async with serving(alone):
        made = await make_prompts(alone, (*LENGTHS, *LENGTHS, *EDGES), seed=7, vocabulary=GEMMA3_VOCAB)
    return made[: -len(EDGES)], made[-len(EDGES) :]


class Rows:
    """Rows by connector and fault, kept in a file of JSON lines where one is named."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, str], Row] = {}
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                connector, row = msgspec.json.decode(line, type=tuple[str, Row])
                self._known[connector, row.fault] = row

    def get(self, connector: str, fault: Fault) -> Row | None:
        return self._known.get((connector, fault.name))

    def add(self, connector: str, row: Row) -> None:
        self._known[connector, row.fault] = row
        if self._path is not None:
            with self._path.open("ab") as stream:
                stream.write(msgspec.json.encode((connector, row)) + b"\n")


async def run_faults(
    setup: Setup,
    faults: Sequence[Fault],
    prompts: Sequence[Prompt],
    edges: Sequence[Prompt],
    ports: Ports,
    add: Callable[[Row], None],
) -> None:
    """Start a pair and let it suffer these faults in turn."""
    assert setup.connector is not None
    p = Server("P", setup, core=0, ports=ports)
    d = Server("D", setup, core=1, ports=ports)
    async with serving(p, d), Gate(p.control_port) as gate, Client(p, d, gate) as client:
        world = World(setup.connector, p, d, client, gate, prompts, edges)
        for fault in faults:
            row = await observe(world, fault)
            add(row)
            sys.stderr.write(f"{setup.connector}: {_line(row)}\n")


def _line(row: Row) -> str:
    text = f"{row.fault}: {row.got or 'nobody waited'} | {'; '.join(row.metrics)} | afterwards {row.after}"
    return text + "".join(f" | HELD {held}" for held in row.held) + "".join(f" | DIED {died}" for died in row.died)


def tables(found: dict[str, list[Row]], faults: Sequence[Fault]) -> str:
    """The Markdown tables: first side by side what clients got, then for each connector what it left behind."""
    rows = {connector: {row.fault: row for row in list_} for connector, list_ in found.items()}
    head = " | ".join(f"{NAMES[connector]}: the client got" for connector in found)
    lines = [f"| Fault | {head} |", "|---|" + "---|" * len(found)]
    for fault in faults:
        cells = [_got(rows[connector].get(fault.name), fault) for connector in found]
        lines.append(f"| {fault.name} | {' | '.join(cells)} |")
    for connector in found:
        lines += ["", f"### What {NAMES[connector]} counted and left behind", ""]
        lines += [
            "| Fault | The metrics say | Held a lease later | Died | The next requests |",
            "|---|---|---|---|---|",
        ]
        for row in found[connector]:
            cells = ["<br>".join(row.metrics), "<br>".join(row.held), "<br>".join(row.died), row.after]
            lines.append(f"| {row.fault} | {' | '.join(cell or '–' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _got(row: Row | None, fault: Fault) -> str:
    if row is None:
        return f"not tried: {fault.why}"
    text = row.got or "nobody waited for an answer"
    bad = {answer.verdict for answer in row.answers} & {"wrong", "hung"}
    text = f"**{text}**" if bad else text
    text += "" if not row.died else "; **the server died**"
    text += "" if not row.held else "; **blocks stay held**"
    return text + ("" if row.after == HEALTHY else f"; **afterwards: {row.after}**")


async def run(connectors: Sequence[str], faults: Sequence[Fault], log_dir: Path, rows: Rows) -> dict[str, list[Row]]:
    """The faults for each connector, with the same prompts. What `rows` knows already is not run again."""
    found = {}
    with Ports() as ports:
        base = Setup(model=tiny_gemma3(), log_dir=log_dir)
        prompts, edges = await reference_prompts(base, ports)
        for connector in connectors:
            directory = log_dir / connector
            directory.mkdir()
            # Each connector with the policy its users have: hma launch sets recompute, vLLM's own default is fail.
            policy = "recompute" if connector == "hma" else None
            setup = Setup(model=base.model, log_dir=directory, connector=connector, policy=policy)
            mine = [fault for fault in faults if fault.only in ("", connector)]
            missing = [fault for fault in mine if rows.get(connector, fault) is None]
            if missing:
                await run_faults(setup, missing, prompts, edges, ports, partial(rows.add, connector))
            found[connector] = [row for fault in mine if (row := rows.get(connector, fault)) is not None]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--connector", choices=["hma", "nixl"], action="append", help="one only; both unless told")
    parser.add_argument("--only", metavar="TEXT", help="faults whose name contains this")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="keep rows here, and go on after those that it holds")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.write and (arguments.connector or arguments.only):
        parser.error("--write needs all faults and both connectors")
    faults = [fault for fault in FAULTS if (arguments.only or "") in fault.name]
    log_dir = Path(tempfile.mkdtemp(prefix="hma-faults-"))
    sys.stderr.write(f"logs: {log_dir}\n")
    found = asyncio.run(run(arguments.connector or ["hma", "nixl"], faults, log_dir, Rows(arguments.rows)))
    text = tables(found, faults)
    sys.stdout.write(text)
    if arguments.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")
    unsound = [row.fault for row in found.get("hma", []) if not row.is_sound]
    for name in unsound:
        sys.stderr.write(f"not sound: {name}\n")
    return 1 if unsound else 0


if __name__ == "__main__":
    sys.exit(main())
