"""A pair under traffic for minutes, while a seeded schedule hurts its servers and clients misbehave.

Every answer is compared with one engine's. At the end nothing may be held, and memory must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hma_cli.cluster.metrics import Counters, difference
from hma_cli.cluster.ports import Ports
from tests.models import GEMMA3_VOCAB, tiny_gemma3
from tests.reliability.client import OUTPUT, Answer, Client, Handle, Prompt, make_prompts
from tests.reliability.faults import BYTES, World, changes
from tests.reliability.gate import Gate
from tests.reliability.schedule import Disturbance, Visit, disturbances, visit
from tests.reliability.servers import LEASE, Server, Setup, restart, serving

CLIENTS = 6
OLD_HANDLES = 30
SLOPE_LIMIT = 1.0  # MiB for each 1,000 requests
READS = "refuse:0.02,fail:0.03,late:0.04:0.4,hang:0.003"


@dataclass
class Tally:
    """What clients got. failed: by what went wrong. odd: failures that nothing here explains. wrong: to look at."""

    answers: Counter[str] = field(default_factory=Counter)
    habits: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, visited: Visit, number: int, prompt: Prompt, answer: Answer) -> None:
        self.answers[answer.verdict] += 1
        self.habits[visited.habit] += 1
        self.slowest = max(self.slowest, answer.seconds)
        if answer.verdict == "failed":
            self.failed[f"{answer} ({visited.habit})" if answer.status == 400 else f"{answer} from {answer.where}"] += 1
        if answer.verdict in ("wrong", "hung"):
            self.wrong.append(f"visit {number}: {answer.verdict}, {len(prompt.tokens)} tokens, {visited}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The end of a soak. slope: MiB for each 1,000 requests, by server."""

    tally: Tally
    disturbed: Counter[str]
    bytes_moved: float
    metrics: tuple[str, ...]
    held: dict[str, float]
    unexpected: tuple[str, ...]
    slope: dict[str, float]
    calm: int

    @property
    def misses(self) -> tuple[str, ...]:
        """What must not be; empty when the soak is passed."""
        answers = self.tally.answers
        found = [f"{answers[verdict]} answers {verdict}" for verdict in ("wrong", "hung") if answers[verdict]]
        found += [f"{name} still holds {share:.1%} of its blocks" for name, share in self.held.items()]
        found += self.unexpected
        found += [
            f"{name} grows by {s:.2f} MiB in 1,000 requests" for name, s in self.slope.items() if s >= SLOPE_LIMIT
        ]
        if not self.bytes_moved:
            found.append("no KV has moved")
        return tuple(found)

    def __str__(self) -> str:
        tally = self.tally
        total = sum(tally.answers.values())
        lines = [f"{total} requests; " + ", ".join(f"{count} {habit}" for habit, count in tally.habits.most_common())]
        lines += ["disturbed: " + ", ".join(f"{count} × {what}" for what, count in self.disturbed.most_common())]
        lines += [f"right {tally.answers['right']}, failed {tally.answers['failed']}, wrong {tally.answers['wrong']}, "]
        lines[-1] += f"hung {tally.answers['hung']}, clients that left {tally.answers['left']}"
        lines += [f"slowest answer {tally.slowest:.1f} s", f"bytes moved {self.bytes_moved:,.0f}"]
        lines += [f"failed: {count} × {what}" for what, count in tally.failed.most_common()]
        lines += [f"counted by {line}" for line in self.metrics]
        lines += [f"held a lease after the end: {self.held or 'nothing'}"]
        lines += [f"servers that ended by themselves: {', '.join(self.unexpected) or 'none'}"]
        if self.calm:
            slopes = ", ".join(f"{name} {value:+.2f} MiB" for name, value in self.slope.items())
            lines += [f"resident memory in 1,000 requests, over {self.calm} quiet ones: {slopes}"]
        lines += [f"MISS: {miss}" for miss in self.misses] + [f"MISS: {text}" for text in tally.wrong[:20]]
        return "\n".join(lines)


class Soak:
    """One soak of a running pair."""

    def __init__(self, world: World, *, seed: int, seconds: float) -> None:
        self._world, self._seed, self._seconds = world, seed, seconds
        self._tally = Tally()
        self._old: deque[tuple[Prompt, Handle]] = deque(maxlen=OLD_HANDLES)
        self._number = 0
        self._until = 0.0
        self._disturbed: Counter[str] = Counter()
        self._counted: dict[str, list[Counters]] = {"P": [], "D": []}

    async def run(self, calm: int) -> Report:
        """Traffic and disturbances, then a lease of silence, then `calm` quiet requests to watch the memory by."""
        self._until = time.monotonic() + self._seconds
        visitors = [asyncio.create_task(self._visit_on()) for _ in range(CLIENTS)]
        await self._disturb(disturbances(self._seed, self._seconds, LEASE))
        await asyncio.gather(*visitors)
        for server in (self._world.prefill, self._world.decode):
            if not server.alive:  # it ended by itself, which the report tells
                await restart(server)
        held = await self._world.held()
        for server in (self._world.prefill, self._world.decode):
            self._counted[server.name].append(await server.metrics())
        slope = await self._watch_memory(calm) if calm else {}
        held |= await self._world.held()
        return self._report(held, slope, calm)

    # Traffic -----

    async def _visit_on(self) -> None:
        while time.monotonic() < self._until:
            number, self._number = self._number, self._number + 1
            one = visit(self._seed, number, len(self._world.prompts), OUTPUT)
            prompt = self._world.prompts[one.prompt]
            for answer in await self._visit(one, prompt):
                self._tally.add(one, number, prompt, answer)
                if answer.verdict == "failed" and not answer.status:
                    await asyncio.sleep(3)  # as a client backs off from a server that is down

    async def _visit(self, one: Visit, prompt: Prompt) -> list[Answer]:
        client = self._world.client
        match one.habit:
            case "uses an old handle" if self._old:
                prompt, handle = self._old[one.edit % len(self._old)]
                return [await client.decode(prompt, handle, count=one.count)]
            case "sends a list":
                prompts = [self._world.prompts[(one.prompt + n) % len(self._world.prompts)] for n in range(3)]
                first = await client.prefill_list(prompts)
                return [first] if isinstance(first, Answer) else await client.decode_list(prompts, first)
        offered = await client.prefill(prompt)
        if isinstance(offered, Answer):
            return [offered]
        handle = offered
        match one.habit:
            case "leaves between":
                return [Answer(verdict="left")]
            case "leaves during":
                return [await _leave(client, prompt, handle, one.pause)]
            case "is refused":
                return [await client.decode(prompt, handle, temperature=-1)]
            case "edits the handle":
                handle = _edited(handle, one.edit, self._old)
        answer = await client.decode(prompt, handle, count=one.count)
        self._old.append((prompt, handle))
        return [answer]

    # Disturbances -----

    async def _disturb(self, plan: Sequence[Disturbance]) -> None:
        started = time.monotonic()
        restarts: set[asyncio.Task[None]] = set()
        for one in plan:
            await asyncio.sleep(max(0.0, started + one.at - time.monotonic()))
            server = {"P": self._world.prefill, "D": self._world.decode}.get(one.target)
            if server is not None and (server.name in {task.get_name() for task in restarts if not task.done()}):
                self._disturbed["skipped, since it was being started"] += 1
                continue
            self._disturbed[f"{one.kind} {one.target}"] += 1
            if one.kind == "kill":
                assert server is not None
                restarts.add(asyncio.create_task(self._replace(server), name=server.name))
            elif one.kind == "stop":
                assert server is not None
                server.stop()
                await asyncio.sleep(one.seconds)
                server.resume()
            else:
                self._world.gate.set(one.kind)
                await asyncio.sleep(one.seconds)
                self._world.gate.set("open")
        for task in restarts:
            await task

    async def _replace(self, server: Server) -> None:
        with contextlib.suppress(TimeoutError):  # its counters are lost with it, where it does not answer any more
            self._counted[server.name].append(await asyncio.wait_for(server.metrics(), 3))
        await restart(server)

    # The end -----

    async def _watch_memory(self, calm: int) -> dict[str, float]:
        """MiB of growth for each 1,000 short requests, by a straight line through what comes after a warm-up."""
        servers = (self._world.prefill, self._world.decode)
        for server in servers:
            await self._touch_all_blocks(server)
        samples: list[tuple[float, ...]] = []
        short = sorted(self._world.prompts, key=lambda prompt: len(prompt.tokens))[:8]
        done = 0

        async def ask_on() -> None:
            nonlocal done
            while done < calm:
                done += 1
                await self._world.client.ask(short[done % len(short)], count=1)
                if done % 25 == 0 and done >= calm // 4:
                    samples.append((done, *(server.rss_mib() for server in servers)))

        await asyncio.gather(*(ask_on() for _ in range(2 * CLIENTS)))
        table = np.array(samples)
        return {
            server.name: float(1000 * np.polyfit(table[:, 0], table[:, 1 + index], 1)[0])
            for index, server in enumerate(servers)
        }

    async def _touch_all_blocks(self, server: Server) -> None:
        """Fill a server's cache once: memory of blocks that were never used is not resident yet."""
        longest = max(self._world.prompts, key=lambda prompt: len(prompt.tokens))
        client = Client(server, server)
        async with client:
            await asyncio.gather(*(client.decode(longest, None, count=2) for _ in range(64)))

    def _report(self, held: dict[str, float], slope: dict[str, float], calm: int) -> Report:
        world = self._world
        lines, moved = [], 0.0
        for server in (world.prefill, world.decode):
            samples: dict[object, float] = {}
            for life in self._counted[server.name]:
                for key, value in life.samples.items():
                    samples[key] = samples.get(key, 0.0) + value
            total = Counters(samples)  # type: ignore[arg-type]
            moved += total.total(BYTES[world.connector])
            lines += [f"{server.name}: {text}" for text in changes(world.connector, difference(Counters(), total))]
        return Report(
            tally=self._tally,
            disturbed=self._disturbed,
            bytes_moved=moved,
            metrics=tuple(lines),
            held=held,
            unexpected=(*world.prefill.unexpected, *world.decode.unexpected),
            slope=slope,
            calm=calm,
        )


async def _leave(client: Client, prompt: Prompt, handle: Handle, pause: float) -> Answer:
    task = asyncio.create_task(client.decode(prompt, handle))
    done, _ = await asyncio.wait({task}, timeout=pause)
    if done:
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return Answer(verdict="left")


def _edited(handle: Handle, draw: int, old: Sequence[tuple[Prompt, Handle]]) -> Handle:
    """The handle with one thing changed: block ids, request, engine, epoch, a port, a type."""
    rng = random.Random(draw)
    other = old[draw % len(old)][1] if old else handle
    blocks = [[rng.randrange(64) for _ in group] or [rng.randrange(64)] for group in handle["remote_block_ids"] or [[]]]
    changes_ = (
        {"remote_block_ids": blocks},
        {"remote_request_id": other["remote_request_id"]},
        {"remote_request_id": "no-such-request"},
        {"remote_engine_id": "x" + handle["remote_engine_id"]},
        {"remote_engine_id": handle["remote_engine_id"][:-1] + "0"},
        {"remote_port": 1},
        {"remote_port": "many"},
        {"remote_host": None},
        {"tp_size": -1},
    )
    return {**handle, **changes_[draw % len(changes_)]}


async def soak(connector: str, *, seed: int, minutes: float, calm: int, reads: str, log_dir: Path) -> Report:
    """Start what is needed and soak it."""
    rng = random.Random(f"prompts/{seed}")
    extra: dict[str, object] = {}
    if reads and connector == "hma":
        extra = {"faults": f"{reads},seed:{seed}", "read_timeout": 2.0, "verify_pages": "corrupt" in reads}
    policy = "recompute" if connector == "hma" else None
    setup = Setup(model=tiny_gemma3(), log_dir=log_dir, connector=connector, policy=policy, extra=extra)
    with Ports() as ports:
        alone = Server("reference", Setup(model=setup.model, log_dir=log_dir, connector=None), core=0, ports=ports)
        async with serving(alone):
            lengths = [
                rng.choice((rng.randint(2, 120), rng.randint(120, 500), rng.randint(500, 1000))) for _ in range(150)
            ]
            prompts = await make_prompts(alone, lengths, seed=seed, vocabulary=GEMMA3_VOCAB)
        p, d = Server("P", setup, core=0, ports=ports), Server("D", setup, core=1, ports=ports)
        async with serving(p, d), Gate(p.control_port) as gate, Client(p, d, gate) as client:
            world = World(connector, p, d, client, gate, prompts, ())
            return await Soak(world, seed=seed, seconds=60 * minutes).run(calm)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1, help="of prompts, disturbances, clients and failing reads")
    parser.add_argument("--connector", choices=["hma", "nixl"], default="hma")
    parser.add_argument("--calm", type=int, default=2000, metavar="N", help="quiet requests at the end, for the memory")
    parser.add_argument("--reads", default=READS, metavar="SPEC", help="faults of D's reads (hma); empty for none")
    arguments = parser.parse_args()
    log_dir = Path(tempfile.mkdtemp(prefix="hma-soak-"))
    sys.stderr.write(f"logs: {log_dir}\n")
    report = asyncio.run(
        soak(
            arguments.connector,
            seed=arguments.seed,
            minutes=arguments.minutes,
            calm=arguments.calm,
            reads=arguments.reads,
            log_dir=log_dir,
        )
    )
    sys.stdout.write(f"{report}\n")
    return 1 if report.misses else 0


if __name__ == "__main__":
    sys.exit(main())
