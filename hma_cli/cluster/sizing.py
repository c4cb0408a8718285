"""How much of the machine each server gets. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from connector.errors import ResourceError
from hma_cli.cluster.machine import GIB, Gpu, Machine

# Measured with vLLM 0.32 on CPU: three processes, torch and the compiled model, before weights and KV cache.
SERVER_OVERHEAD = int(1.75 * GIB)
_SPARE_CORE_FROM = 4
_GPU_UTILISATION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShare:
    """One server's cores and KV space. `cores`: one tuple for each worker (tensor and pipeline parallel rank).

    shared: other workers run on these cores, too. Such a worker has one thread, and the kernel places it: see
    `split_cores`.
    """

    cores: tuple[tuple[int, ...], ...]
    kv_bytes: int
    shared: bool = False

    @property
    def binding(self) -> str:
        """The value of VLLM_CPU_OMP_THREADS_BIND.

        >>> CpuShare(cores=((0, 1), (2,)), kv_bytes=0).binding
        '0,1|2'
        >>> CpuShare(cores=((0, 1),), kv_bytes=0, shared=True).binding
        'nobind'
        """
        return "nobind" if self.shared else "|".join(",".join(map(str, worker)) for worker in self.cores)

    @property
    def threads(self) -> int | None:
        """The value of OMP_NUM_THREADS; None where vLLM takes it from the binding."""
        return 1 if self.shared else None

    @property
    def text(self) -> str:
        """For people: cores as ranges.

        >>> CpuShare(cores=((0, 1, 2, 5), (6,)), kv_bytes=0).text
        'core 0-2,5|6'
        >>> CpuShare(cores=((0, 1),), kv_bytes=0, shared=True).text
        'core 0-1, shared'
        """
        return "core " + "|".join(_ranges(worker) for worker in self.cores) + (", shared" if self.shared else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """One server's GPUs and the part of their memory that it may use."""

    gpus: tuple[str, ...]
    utilisation: float


Share = CpuShare | GpuShare


def _ranges(cores: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def share_cpu(
    machine: Machine, *, workers: tuple[int, ...], weight_bytes: int, kv_space_gib: float | None
) -> tuple[CpuShare, ...]:
    """Shares for servers with `workers[i]` workers each. ResourceError when the memory does not suffice.

    Two servers with one worker each on cores (0, 1) and 24 GiB: ((0,),), ((1,),) and 1 GiB of KV space each.
    """
    cores = split_cores(machine, workers)
    shared = sum(workers) > len(machine.cores)
    kv_bytes = kv_space(machine.memory_free, servers=len(workers), weight_bytes=weight_bytes, wanted_gib=kv_space_gib)
    return tuple(CpuShare(cores=mine, kv_bytes=kv_bytes, shared=shared) for mine in cores)


def split_cores(machine: Machine, workers: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Every worker gets neighbouring cores of its own, the same number each, or all of them where cores run out.

    Two workers must not be tied to one core: while a worker waits for its next step it calls sched_yield in a loop
    (vLLM's shm_broadcast.SpinCondition), without a pause as long as its engine holds blocks for a decode engine. With
    Linux 6.18 the other worker of that core was not run at all meanwhile, and the blocks were held until it had run.
    A worker that may move is taken over by a core that has time.

    One thread per physical core where that still leaves each worker one: two threads of a core share its vector units.
    A worker that has four cores or more leaves one of them to its server's other processes.
    """
    total = sum(workers)
    cores = machine.cores[: machine.physical] if machine.physical >= total else machine.cores
    each = len(cores) // total
    if each == 0:
        return tuple((tuple(sorted(cores)),) * count for count in workers)
    shares: list[tuple[int, ...]] = []
    for worker in range(total):
        mine = tuple(sorted(cores)[worker * each : (worker + 1) * each])
        shares.append(mine[:-1] if each >= _SPARE_CORE_FROM else mine)
    remaining = iter(shares)
    return tuple(tuple(next(remaining) for _ in range(count)) for count in workers)


def kv_space(free: int, *, servers: int, weight_bytes: int, wanted_gib: float | None) -> int:
    """Bytes of KV cache for each server.

    Unless asked for, the servers share an eighth of the free memory, in whole GiB and at least 1 each: room is left for
    the page cache that holds the weights, and for whatever else the machine does.
    """
    per_server = free // servers - SERVER_OVERHEAD - weight_bytes
    wanted = max(1, free // (8 * servers) // GIB) * GIB if wanted_gib is None else int(wanted_gib * GIB)
    if wanted_gib is None and wanted > per_server >= GIB:
        wanted = per_server // GIB * GIB
    if wanted <= 0:
        raise ResourceError("KV space must be more than 0 GiB.", remedy="Give --kv-space a positive number of GiB.")
    if wanted > per_server:
        fits = max(0, math.floor(per_server / GIB * 10) / 10)
        raise ResourceError(
            f"{servers} server(s) need {servers * (SERVER_OVERHEAD + weight_bytes + wanted) / GIB:.1f} GiB of memory "
            f"({SERVER_OVERHEAD / GIB:.2f} for each process group, {weight_bytes / GIB:.2f} for weights, "
            f"{wanted / GIB:g} for the KV cache), and {free / GIB:.1f} GiB are free.",
            remedy=f"Give --kv-space {fits:g} or less."
            if fits >= 0.1
            else "Free some memory or serve a smaller model.",
        )
    return wanted


def share_gpus(gpus: tuple[Gpu, ...], *, workers: tuple[int, ...]) -> tuple[GpuShare, ...]:
    """Whole GPUs for each worker while they last; otherwise servers take turns on GPUs and divide their memory.

    Two servers on one GPU get 0.45 of its memory each. ResourceError where one server's workers outnumber the GPUs.
    """
    names = [gpu.index for gpu in gpus]
    if sum(workers) <= len(names):
        taken = iter(names)
        return tuple(
            GpuShare(gpus=tuple(next(taken) for _ in range(count)), utilisation=_GPU_UTILISATION) for count in workers
        )
    if max(workers) > len(names):
        raise ResourceError(
            f"A server with {max(workers)} workers needs as many GPUs, and {len(names)} are visible.",
            remedy="Lower --tensor-parallel-size.",
        )
    placed, position = [], 0
    for count in workers:
        placed.append(tuple(names[(position + step) % len(names)] for step in range(count)))
        position += count
    load = {name: sum(name in mine for mine in placed) for name in names}
    return tuple(
        GpuShare(gpus=mine, utilisation=math.floor(_GPU_UTILISATION * 100 / max(load[name] for name in mine)) / 100)
        for mine in placed
    )
