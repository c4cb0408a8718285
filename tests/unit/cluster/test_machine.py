"""Cores, memory and GPUs from fake proc and sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from hma_cli.cluster.machine import (
    GIB,
    cgroup_memory_free,
    cpu_quota,
    inspect_machine,
    parse_nvidia_smi,
    siblings_reader,
    usable_cores,
    visible_gpus,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(3 * GIB),
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/box/memory.current": str(GIB),
        },
    )
    assert cpu_quota(root) == 1.5
    assert cgroup_memory_free(root) == 6 * GIB


def test_cgroup_v1_reads_each_controller_and_ignores_no_limit(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "5",
        },
    )
    assert cpu_quota(root) == 4.0
    assert cgroup_memory_free(root) is None


def test_a_container_whose_group_is_the_mount_itself(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/host/path/not/mounted\n", "sys/fs/cgroup/cpu.max": "200000 100000"},
    )
    assert cpu_quota(root) == 2.0


def test_nothing_readable_means_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert cgroup_memory_free(tmp_path) is None
    assert siblings_reader(tmp_path) == {}


@pytest.mark.parametrize(
    ("affinity", "quota", "siblings", "expected"),
    [
        ([0, 1], None, {}, ((0, 1), 2)),
        ([0, 1, 2, 3], None, {0: 0, 1: 1, 2: 0, 3: 1}, ((0, 1, 2, 3), 2)),
        ([0, 1, 2, 3], None, {0: 0, 1: 0, 2: 2, 3: 2}, ((0, 2, 1, 3), 2)),
        ([4, 5, 6, 7], 2.0, {}, ((4, 5), 2)),
        ([0, 1], 0.5, {}, ((0,), 1)),
    ],
)
def test_cores_come_one_per_physical_core_first(affinity, quota, siblings, expected) -> None:  # type: ignore[no-untyped-def]
    assert usable_cores(affinity, quota, siblings) == expected


def test_gpus_as_nvidia_smi_lists_them_and_as_the_environment_hides_them() -> None:
    gpus = parse_nvidia_smi("0, 24576, 24000\n1, 24576, 20000\nsomething else\n")
    assert [(gpu.index, gpu.total >> 30) for gpu in gpus] == [("0", 24), ("1", 24)]
    assert [gpu.index for gpu in visible_gpus(gpus, "1,0")] == ["1", "0"]
    assert visible_gpus(gpus, "") == ()
    assert visible_gpus(gpus, None) == gpus


def test_this_machine_has_cores_and_memory() -> None:
    machine = inspect_machine()
    assert machine.cores
    assert 1 <= machine.physical <= len(machine.cores)
    assert machine.memory_free > 0
