"""What this machine can give: cores, memory and GPUs, as far as this process may use them.

Limits of control groups count (version 1 and 2, every ancestor), since a container sees the whole host otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi lists it. Memory in bytes."""

    index: str
    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """cores: ids of logical CPUs that may be used, one per physical core first; physical: how many physical cores these
    are. memory_free: bytes that new processes can take without pushing anything out."""

    cores: tuple[int, ...]
    physical: int
    memory_free: int
    gpus: tuple[Gpu, ...] = ()


def inspect_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine. `root` is where proc and sys are mounted (tests give a directory of their own)."""
    import psutil

    cores, physical = usable_cores(sorted(os.sched_getaffinity(0)), cpu_quota(root), siblings_reader(root))
    free = psutil.virtual_memory().available
    limit = cgroup_memory_free(root)
    return Machine(
        cores=cores,
        physical=physical,
        memory_free=free if limit is None else min(free, limit),
        gpus=visible_gpus(_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def usable_cores(affinity: list[int], quota: float | None, siblings: dict[int, int]) -> tuple[tuple[int, ...], int]:
    """Order logical CPUs, one per physical core first, and cut the list to the CPU quota (at least one).

    siblings: logical CPU -> the first logical CPU of its physical core.
    >>> usable_cores([0, 1, 2, 3], 3.5, {0: 0, 1: 1, 2: 0, 3: 1})
    ((0, 1, 2), 2)
    """
    firsts: dict[int, int] = {}
    for cpu in affinity:
        firsts.setdefault(siblings.get(cpu, cpu), cpu)
    one_each = sorted(firsts.values())
    ordered = one_each + [cpu for cpu in affinity if cpu not in set(one_each)]
    if quota is not None:
        ordered = ordered[: max(1, int(quota))]
    return tuple(ordered), len({siblings.get(cpu, cpu) for cpu in ordered})


def siblings_reader(root: Path) -> dict[int, int]:
    """Logical CPU -> first logical CPU of the same physical core; empty where the kernel does not tell."""
    found = {}
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        text = _read(path).replace("-", ",").split(",")[0]
        if text.isdigit():
            found[int(path.parent.parent.name.removeprefix("cpu"))] = int(text)
    return found


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of CPU time that control groups allow, the least of all ancestors; None without a limit."""
    quotas = []
    for directory in _cgroup_directories(root, "cpu"):
        words = _read(directory / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_memory_free(root: Path) -> int | None:
    """Bytes below the tightest memory limit of any ancestor, file cache counted as free; None without a limit."""
    room = []
    for directory in _cgroup_directories(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read(directory / limit_name), _read(directory / usage_name)
            # Version 1 writes "no limit" as a number near 2**63.
            if limit.isdigit() and usage.isdigit() and int(limit) < 1 << 60:
                cached = _statistic(directory / "memory.stat", "inactive_file")
                room.append(max(0, int(limit) - int(usage) + cached))
    return min(room, default=None)


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Only those that CUDA_VISIBLE_DEVICES names, in its order; all of them where it is not set."""
    if visible is None:
        return gpus
    by_index = {gpu.index: gpu for gpu in gpus}
    return tuple(by_index[name.strip()] for name in visible.split(",") if name.strip() in by_index)


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Read `index, memory.total, memory.free` in MiB, one GPU a line.

    >>> parse_nvidia_smi("0, 24576, 24000")[0].index
    '0'
    """
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and all(word.isdigit() for word in words):
            gpus.append(Gpu(index=words[0], total=int(words[1]) << 20, free=int(words[2]) << 20))
    return tuple(gpus)


def _nvidia_smi() -> tuple[Gpu, ...]:
    if (tool := shutil.which("nvidia-smi")) is None:
        return ()
    query = [tool, "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_nvidia_smi(done.stdout)


def _cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """This process's control groups for one controller, from its own up to the root of the hierarchy.

    Inside a container the path in /proc/self/cgroup may not exist below the mount; the mount's root then is the group.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            mount = mount if mount.is_dir() else root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(mount))


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
