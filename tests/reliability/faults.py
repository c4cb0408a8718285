"""Single misfortunes: what the client got, what the metrics say, what stays held, whether the pair goes on.

A fault is a short program against a `World`. It must prove that it has happened (`World.proved`), or it is a defect of
the test. The same list is run for our connector and for vLLM's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hma_cli.cluster.metrics import Counters, difference
from tests.reliability.client import Answer, Client, Handle, Prompt
from tests.reliability.gate import Gate
from tests.reliability.servers import LEASE, Server, restart

STARTS = 10
TCP = {"UCX_TLS": "tcp,self"}
KV_USAGE = "vllm:kv_cache_usage_perc"
_COUNTED = {
    "hma": ("transfers", "fallbacks", "claims_refused", "leases_expired", "part_failures", "faults_injected"),
    "nixl": (
        "num_failed_transfers",
        "num_failed_notifications",
        "num_kv_expired_reqs",
        "num_notifications_after_expiry",
    ),
}
_LABELS = ("reason", "outcome", "kind", "fault")


@dataclass
class World:
    """A running pair, its client, and prompts with known answers. proof: that the fault has happened."""

    connector: str
    prefill: Server
    decode: Server
    client: Client
    gate: Gate
    prompts: Sequence[Prompt]
    edges: Sequence[Prompt]
    proof: str = ""
    _next: int = 0

    def prompt(self) -> Prompt:
        """The next prompt; none is used twice in a row."""
        self._next += 1
        return self.prompts[self._next % len(self.prompts)]

    def take(self, count: int) -> list[Prompt]:
        return [self.prompt() for _ in range(count)]

    def proved(self, happened: bool, text: str) -> None:
        """Note that the fault has happened; RuntimeError when it has not."""
        if not happened:
            raise RuntimeError(f"The fault has not happened: {text}")
        self.proof = text

    async def handle(self, prompt: Prompt) -> Handle:
        """Prefill a prompt; RuntimeError where that fails, since no fault is under way yet."""
        handle = await self.client.prefill(prompt)
        if isinstance(handle, Answer) or not handle:
            raise RuntimeError(f"A healthy prefill server gave no handle: {handle}")
        return handle

    async def read_over(self, env: dict[str, str]) -> None:
        """Have both servers use these UCX settings; restarts those that do not."""
        others = [server for server in (self.prefill, self.decode) if server.env != env]
        for server in others:
            server.env = env
        await asyncio.gather(*(restart(server) for server in others))

    async def held(self) -> dict[str, float]:
        """Share of the KV cache that living servers hold although no request runs, after at most one lease more."""
        deadline = asyncio.get_running_loop().time() + LEASE + 4
        while True:
            found: dict[str, float] = {}
            for server in (self.prefill, self.decode):
                if server.alive:
                    usage = (await server.metrics()).total(KV_USAGE)
                    found |= {server.name: usage} if usage > 0 else {}
            if not found or asyncio.get_running_loop().time() > deadline:
                return found
            await asyncio.sleep(0.5)


Answers = list[Answer]
Run = Callable[[World], Awaitable[Answers]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """cases: of the field cases. tcp: the pair reads over TCP instead of shared memory. only: the connector that can be
    given this fault. why: it cannot be given the other."""

    name: str
    run: Run
    cases: str = ""
    tcp: bool = False
    only: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one fault. metrics: of both servers, what changed. died: servers that ended by themselves.
    after: what healthy requests got afterwards, with the number of those whose KV moved."""

    fault: str
    cases: str
    answers: tuple[Answer, ...]
    proof: str
    metrics: tuple[str, ...]
    held: tuple[str, ...]
    died: tuple[str, ...]
    after: str

    @property
    def is_sound(self) -> bool:
        """No wrong token, no hang, nothing held, nobody dead, and the pair goes on moving KV."""
        bad = {answer.verdict for answer in self.answers} & {"wrong", "hung"}
        return not bad and not self.held and not self.died and self.after == HEALTHY

    @property
    def got(self) -> str:
        """The answers in words, equal ones counted."""
        counts = Counter(str(answer) for answer in self.answers)
        slowest = max((answer.seconds for answer in self.answers), default=0.0)
        text = "; ".join(f"{count} × {what}" if len(self.answers) > 1 else what for what, count in counts.items())
        return f"{text}, after {slowest:.0f} s" if slowest >= 3 else text


HEALTHY = "right, KV moved"


async def observe(world: World, fault: Fault) -> Row:
    """Run one fault and judge the service during it and afterwards. Dead servers are started again."""
    world.proof = ""
    await world.read_over(TCP if fault.tcp else {})
    lives = {server.name: server.life for server in (world.prefill, world.decode)}
    unexpected = {server.name: len(server.unexpected) for server in (world.prefill, world.decode)}
    before = {server.name: await server.metrics() for server in (world.prefill, world.decode)}
    answers = await fault.run(world)
    if not world.proof:
        raise RuntimeError(f"{fault.name}: it has not shown that it happened")
    world.gate.set("open")
    held = await world.held()
    metrics, died = [], []
    for server in (world.prefill, world.decode):
        died += server.unexpected[unexpected[server.name] :]
        if server.alive:
            same = server.life == lives[server.name]
            now = await server.metrics()
            metrics += [
                f"{server.name}: {text}"
                for text in changes(world.connector, difference(before[server.name] if same else Counters(), now))
            ]
        if held or not server.alive:
            await restart(server)  # the next fault must not suffer from this one
    return Row(
        fault=fault.name,
        cases=fault.cases,
        answers=tuple(answers),
        proof=world.proof,
        metrics=tuple(metrics),
        held=tuple(f"{name}: {share:.1%} of its blocks" for name, share in held.items()),
        died=tuple(died),
        after=await _afterwards(world),
    )


async def _afterwards(world: World, attempts: int = 2) -> str:
    """Whether healthy requests are answered from moved KV again. The first may find a peer that is being left alone."""
    text = ""
    for _ in range(attempts):
        before = await world.decode.metrics()
        answer = await world.client.ask(world.prompt())
        moved = difference(before, await world.decode.metrics()).total(BYTES[world.connector])
        text = ("right" if answer.verdict == "right" else str(answer)) + (", KV moved" if moved else ", no KV moved")
        if text == HEALTHY:
            return text
        await asyncio.sleep(LEASE)
    return text


BYTES = {"hma": "vllm:hma_bytes_moved_total", "nixl": "vllm:nixl_bytes_transferred_sum"}


def changes(connector: str, delta: Counters) -> list[str]:
    """The connector's counters that changed, as `fallbacks{epoch, recomputed} 1`; requests that ended in an error."""
    found: dict[str, float] = {}
    for (name, labels), value in delta.samples.items():
        for short in _COUNTED[connector]:
            if value and name == f"vllm:{connector}_{short}_total":
                inside = ", ".join(dict(labels)[label] for label in _LABELS if label in dict(labels))
                key = f"{short}{{{inside}}}" if inside else short
                found[key] = found.get(key, 0) + value
        if value and name == "vllm:request_success_total" and dict(labels).get("finished_reason") == "error":
            found["requests ended in error"] = found.get("requests ended in error", 0) + value
    return [f"{key} {value:g}" for key, value in sorted(found.items())]


# The faults --------------------------------------------------------------------------------------------------------


async def nothing(world: World) -> Answers:
    answers = [await world.client.ask(prompt) for prompt in world.take(4)]
    world.proved(True, "no fault")
    return answers


async def edges(world: World) -> Answers:
    world.proved(len(world.edges) > 1, f"prompts of {', '.join(str(len(p.tokens)) for p in world.edges)} tokens")
    return [await world.client.ask(prompt) for prompt in world.edges]


def edited(change: Callable[[World, Handle], Handle], text: str) -> Run:
    """A handle that is changed on its way."""

    async def run(world: World) -> Answers:
        prompt = world.prompt()
        handle = await world.handle(prompt)
        changed = change(world, dict(handle))
        world.proved(changed != handle, text)
        return [await world.client.decode(prompt, changed)]

    return run


def _shifted(_: World, handle: Handle) -> Handle:
    groups = handle["remote_block_ids"] or [[1, 2, 3]] * 7
    return {**handle, "remote_block_ids": [[b + 1 if b else 0 for b in group] for group in groups]}


def _shifted_in_one_group(_: World, handle: Handle) -> Handle:
    groups = [list(group) for group in handle["remote_block_ids"] or [[1, 2, 3]] * 7]
    groups[0] = [b + 1 if b else 0 for b in groups[0]]
    return {**handle, "remote_block_ids": groups}


def _other_engine(_: World, handle: Handle) -> Handle:
    return {**handle, "remote_engine_id": "another-" + handle["remote_engine_id"]}


def _huge_blocks(_: World, handle: Handle) -> Handle:
    return {**handle, "remote_block_ids": [[10**6, 10**6 + 1]] * 7}


def _closed_port(_: World, handle: Handle) -> Handle:
    return {**handle, "remote_port": 1}


def _foreign_host(_: World, handle: Handle) -> Handle:
    return {**handle, "remote_host": "192.0.2.1"}


async def swapped(world: World) -> Answers:
    """Two requests' handles change places."""
    one, two = world.take(2)
    handles = [await world.handle(one), await world.handle(two)]
    world.proved(handles[0] != handles[1], "two handles swapped")
    return list(await asyncio.gather(world.client.decode(one, handles[1]), world.client.decode(two, handles[0])))


async def used_twice(world: World) -> Answers:
    prompt = world.prompt()
    handle = await world.handle(prompt)
    first = await world.client.decode(prompt, handle)
    for other in world.take(6):
        await world.client.prefill(other)
    world.proved(first.verdict == "right", "the handle was used before")
    return [await world.client.decode(prompt, handle)]


async def used_late(world: World) -> Answers:
    """After its lease, when P has given the blocks to other prompts."""
    prompt = world.prompt()
    handle = await world.handle(prompt)
    await asyncio.sleep(LEASE + 3)
    for other in world.take(12):
        await world.client.prefill(other)
    world.proved(True, f"{LEASE + 3:g} s and 12 other prompts later")
    return [await world.client.decode(prompt, handle)]


async def prompt_list(world: World) -> Answers:
    prompts = world.take(3)
    handle = await world.client.prefill_list(prompts)
    if isinstance(handle, Answer):
        raise RuntimeError(f"no handle for a list: {handle}")
    world.proved(bool(handle), "one handle for three prompts")
    return await world.client.decode_list(prompts, handle)


async def unclaimed(world: World) -> Answers:
    await world.handle(world.prompt())
    world.proved((await world.prefill.metrics()).total(KV_USAGE) > 0, "the client left after prefill")
    return []


async def left_during(world: World) -> Answers:
    """Clients that go away at different moments after D was asked."""
    left = 0
    for pause in (0.0, 0.02, 0.05, 0.1):
        prompt = world.prompt()
        task = asyncio.create_task(world.client.decode(prompt, await world.handle(prompt)))
        await asyncio.sleep(pause)
        left += task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    world.proved(left == 4, f"{left} clients went away")
    return []


async def refused_by_d(world: World) -> Answers:
    """D refuses the request before its engine has seen it."""
    prompt = world.prompt()
    answers = [await world.client.decode(prompt, await world.handle(prompt), temperature=-3)]
    answers.append(await world.client.decode(prompt, await world.handle(prompt), model="unknown"))
    answers.append(await world.client.decode(prompt, await world.handle(prompt), max_tokens=5000))
    world.proved(all(answer.status in (400, 404) for answer in answers), "three requests that D refuses")
    return answers


def cut(mode: Any) -> Run:
    """The control channel is cut between prefill and decode, and comes back."""

    async def run(world: World) -> Answers:
        prompts = world.take(3)
        handles = [await world.handle(prompt) for prompt in prompts]
        world.gate.set(mode)
        world.proved(True, f"the control channel is {mode}")
        return list(await asyncio.gather(*(world.client.decode(p, h) for p, h in zip(prompts, handles, strict=True))))

    return run


async def p_stopped(world: World) -> Answers:
    """P stops right after its reply, for two leases."""
    prompts = world.take(2)
    handles = [await world.handle(prompt) for prompt in prompts]
    world.prefill.stop()
    try:
        answers = await asyncio.gather(*(world.client.decode(p, h) for p, h in zip(prompts, handles, strict=True)))
        await asyncio.sleep(2 * LEASE)
    finally:
        world.prefill.resume()
    world.proved(world.prefill.alive, "P was stopped for two leases")
    return list(answers)


async def d_stopped(world: World) -> Answers:
    """D stops with requests under way, for three leases; meanwhile P gives its blocks to others."""
    prompts = world.take(6)
    handles = [await world.handle(prompt) for prompt in prompts]
    tasks = [asyncio.create_task(world.client.decode(p, h)) for p, h in zip(prompts, handles, strict=True)]
    await asyncio.sleep(0.05)
    world.decode.stop()
    try:
        await asyncio.sleep(3 * LEASE)
        for other in world.take(12):
            await world.client.prefill(other)
    finally:
        world.decode.resume()
    world.proved(world.decode.alive, "D was stopped for three leases")
    return list(await asyncio.gather(*tasks))


async def p_killed_before(world: World) -> Answers:
    prompts = world.take(2)
    handles = [await world.handle(prompt) for prompt in prompts]
    world.prefill.kill()
    await world.prefill.gone()
    world.proved(not world.prefill.alive, "P is dead before D is asked")
    return list(await asyncio.gather(*(world.client.decode(p, h) for p, h in zip(prompts, handles, strict=True))))


def p_killed_during(milliseconds: int) -> Run:
    """P is killed so long after D was asked for eight prompts."""

    async def run(world: World) -> Answers:
        prompts = world.take(8)
        handles = [await world.handle(prompt) for prompt in prompts]
        tasks = [asyncio.create_task(world.client.decode(p, h)) for p, h in zip(prompts, handles, strict=True)]
        await asyncio.sleep(milliseconds / 1000)
        world.prefill.kill()
        answers = await asyncio.gather(*tasks)
        await world.prefill.gone()
        world.proved(not world.prefill.alive, f"P died {milliseconds} ms after D was asked")
        return list(answers)

    return run


async def p_replaced(world: World) -> Answers:
    """P is killed and started again on the same ports; D meets the new one, and a handle of the old one."""
    prompt = world.prompt()
    handle = await world.handle(prompt)
    await restart(world.prefill)
    world.proved(world.prefill.alive, "another P listens on the same ports")
    fresh = world.prompt()
    return [await world.client.decode(prompt, handle), await world.client.decode(fresh, await world.handle(fresh))]


async def d_killed(world: World) -> Answers:
    """D is killed with requests under way; P's blocks come free, and D's next life goes on with it."""
    prompts = world.take(6)
    handles = [await world.handle(prompt) for prompt in prompts]
    tasks = [asyncio.create_task(world.client.decode(p, h)) for p, h in zip(prompts, handles, strict=True)]
    await asyncio.sleep(0.05)
    world.decode.kill()
    answers = await asyncio.gather(*tasks)
    await world.decode.gone()
    world.proved(not world.decode.alive, "D died with six requests under way")
    return list(answers)


async def garbage(world: World) -> Answers:
    """Bytes, frames and connections that no peer sends, at P's control port; then healthy requests."""
    sent = await asyncio.to_thread(_attack, world.prefill.control_port)
    # Only 116 reached vLLM's own listener; that is something about it, and shall not end the run.
    least = 1000 if world.connector == "hma" else 100
    world.proved(sent > least, f"{sent} messages and connections")
    return [await world.client.ask(prompt) for prompt in world.take(3)]


def _attack(port: int) -> int:
    """1,000 connections, ZeroMQ messages of random bytes up to 10 MB, a broken handshake. Returns how many were sent:
    a listener may take fewer."""
    import socket

    import zmq

    sent = 0
    rng = random.Random(5)
    raw = []
    for _ in range(1000):
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), timeout=2)
            one.sendall(rng.randbytes(rng.randrange(1, 200)))
            raw.append(one)
            sent += 1
    for one in raw:
        one.close()
    context = zmq.Context()
    try:
        for kind in (zmq.DEALER, zmq.REQ):
            with context.socket(kind) as socket_:
                socket_.linger = 500
                socket_.connect(f"tcp://127.0.0.1:{port}")
                frames: Iterable[list[bytes]] = (
                    [b""],
                    [b"\x00" * 100],
                    [b"", rng.randbytes(2000)],
                    [rng.randbytes(40), b"", rng.randbytes(100)],
                    [os.urandom(10 << 20)],
                    [b"x"] * 200,
                    [b"", b"\x92\xa8get_meta\x00"],
                )
                for parts in frames:
                    with contextlib.suppress(zmq.ZMQError):
                        socket_.send_multipart(parts, flags=zmq.NOBLOCK)
                        sent += 1
    finally:
        context.destroy(linger=500)
    return sent


async def bad_reads(world: World) -> Answers:
    """D lives on with reads that are refused, fail, never end, end late, or bring a wrong byte."""
    await restart(world.prefill, verify_pages=True)
    faults = "refuse:0.15,fail:0.15,corrupt:0.15,late:0.1:0.5,hang:0.05,seed:3"
    await restart(world.decode, verify_pages=True, faults=faults, read_timeout=1.0, part_runs=4)
    answers = list(await asyncio.gather(*(world.client.ask(prompt) for prompt in world.take(16))))
    injected = (await world.decode.metrics()).by_label("vllm:hma_faults_injected_total", "fault")
    world.proved(len(injected) >= 4, ", ".join(f"{name} {count:g}" for name, count in injected.items()))
    return answers


async def started_together(world: World) -> Answers:
    """Both servers are started in the same instant, again and again."""
    answers, rss = [], []
    for _ in range(STARTS):
        await asyncio.gather(restart(world.prefill), restart(world.decode))
        answers.append(await world.client.ask(world.prompt()))
        rss.append(world.prefill.rss_mib() + world.decode.rss_mib())
    world.proved(len(rss) == STARTS, f"{STARTS} starts; resident memory {min(rss):,.0f} to {max(rss):,.0f} MiB")
    if max(rss) > 1.1 * min(rss):
        raise RuntimeError(f"memory is not the same after each start: {rss}")
    return answers


FAULTS: tuple[Fault, ...] = (
    Fault(name="none", run=nothing),
    Fault(name="prompt lengths at the window's edge", cases="W5", run=edges),
    Fault(name="block ids of every group shifted by one", cases="W1", run=edited(_shifted, "ids shifted")),
    Fault(
        name="block ids of one group shifted by one", cases="W1", run=edited(_shifted_in_one_group, "one group shifted")
    ),
    Fault(name="block ids far outside of P's cache", cases="W1", run=edited(_huge_blocks, "ids of 10⁶")),
    Fault(name="the handles of two requests swapped", cases="W1", run=swapped),
    Fault(name="a handle that names another engine", cases="W1, S3", run=edited(_other_engine, "engine id changed")),
    Fault(name="a handle with a closed port", cases="H4", run=edited(_closed_port, "port 1")),
    Fault(name="a handle that names a foreign host", cases="X3", run=edited(_foreign_host, "host 192.0.2.1")),
    Fault(name="a handle used a second time", cases="W2", run=used_twice),
    Fault(name="a handle used after its lease", cases="W2", run=used_late),
    Fault(name="one handle for a list of three prompts", cases="W3", run=prompt_list),
    Fault(name="D refuses the request (HTTP 400, 404)", cases="L1", run=refused_by_d),
    Fault(name="the client leaves after prefill", cases="L1", run=unclaimed),
    Fault(name="clients leave while D loads", cases="L1", run=left_during),
    Fault(name="control channel cut off", cases="H4", run=cut("closed")),
    Fault(name="control channel silent", cases="H3", run=cut("silent")),
    Fault(name="P stopped for two leases after its reply", cases="H3", run=p_stopped),
    Fault(name="D stopped for three leases while it loads", cases="L2", run=d_stopped),
    Fault(name="1,000 connections and garbage at P's control port", cases="X1", run=garbage),
    Fault(name="P killed before D is asked", cases="H4, C1", tcp=True, run=p_killed_before),
    Fault(name="P killed 5 ms after D was asked", cases="C2", tcp=True, run=p_killed_during(5)),
    Fault(name="P killed 20 ms after D was asked", cases="C2", tcp=True, run=p_killed_during(20)),
    Fault(name="P killed 50 ms after D was asked", cases="C2", tcp=True, run=p_killed_during(50)),
    Fault(name="P killed 100 ms after D was asked", cases="C2", tcp=True, run=p_killed_during(100)),
    Fault(name="P replaced on the same ports", cases="C1", tcp=True, run=p_replaced),
    Fault(name="D killed while it loads", cases="L1, C1", tcp=True, run=d_killed),
    Fault(
        name="reads refused, failed, late, hung or with a wrong byte",
        cases="W4, W8, C3",
        run=bad_reads,
        only="hma",
        why="it has no seam to inject them",
    ),
    Fault(
        name=f"P and D started in the same instant, {STARTS} times",
        cases="H5",
        run=started_together,
        only="hma",
        why="it is not about faults of a connector",
    ),
)
