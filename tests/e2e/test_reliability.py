"""A real pair of servers that are stopped and killed: right answers or errors, nothing held, KV moves again afterwards.

`scripts/faults` runs many more faults, for the in-tree connector too; `scripts/soak` mixes them at random.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from hma_cli.cluster.ports import Ports
from tests.models import GEMMA3_VOCAB, tiny_gemma3
from tests.reliability.client import Client, make_prompts
from tests.reliability.faults import FAULTS, TCP, Row, World, observe
from tests.reliability.gate import Gate
from tests.reliability.servers import Server, Setup, serving
from tests.reliability.table import LENGTHS

pytestmark = pytest.mark.e2e

WANTED = (
    "P stopped for two leases after its reply",
    "D stopped for three leases while it loads",
    "P killed 20 ms after D was asked",
    "D killed while it loads",
)


async def suffer(log_dir: Path) -> list[Row]:
    """The wanted faults, one after the other, over TCP: two starts of each server."""
    setup = Setup(model=tiny_gemma3(), log_dir=log_dir)
    with Ports() as ports:
        p, d = (Server(name, setup, core=core, ports=ports) for core, name in enumerate("PD"))
        p.env = d.env = TCP
        async with serving(p, d), Gate(p.control_port) as gate, Client(p, d, gate) as client:
            # Without a handle D answers as an engine without a connector does; tests/engine shows that.
            prompts = await make_prompts(d, LENGTHS, seed=9, vocabulary=GEMMA3_VOCAB)
            world = World("hma", p, d, client, gate, prompts, ())
            wanted = [fault for name in WANTED for fault in FAULTS if fault.name == name]
            return [await observe(world, replace(fault, tcp=True)) for fault in wanted]


def test_a_pair_survives_the_stop_and_the_death_of_either_side(tmp_path: Path) -> None:
    """H3, L2, C1, C2 and the death of D in L1."""
    rows = {row.fault: row for row in asyncio.run(suffer(tmp_path))}
    assert tuple(rows) == WANTED
    assert [row for row in rows.values() if not row.is_sound] == []
    for name in WANTED[:3]:  # with the policy `recompute` every client has its answer
        assert {answer.verdict for answer in rows[name].answers} == {"right"}, rows[name]
    assert any("fallbacks{timeout, recomputed} 2" in text for text in rows[WANTED[0]].metrics)
    assert any("leases_expired" in text for text in rows[WANTED[1]].metrics)
    assert {answer.verdict for answer in rows[WANTED[3]].answers} == {"failed"}
    assert any("leases_expired" in text for text in rows[WANTED[3]].metrics)
