"""Each server gets cores and memory of its own."""

from __future__ import annotations

import pytest

from connector.errors import ResourceError
from hma_cli.cluster.machine import GIB, Gpu, Machine
from hma_cli.cluster.sizing import SERVER_OVERHEAD, share_cpu, share_gpus, split_cores


def machine(cores: int, *, physical: int | None = None, free: int = 24 * GIB) -> Machine:
    return Machine(cores=tuple(range(cores)), physical=physical or cores, memory_free=free)


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=str(i), total=80 * GIB, free=79 * GIB) for i in range(count))


@pytest.mark.parametrize(
    ("cores", "physical", "workers", "expected"),
    [
        (2, 2, (1, 1), (((0,),), ((1,),))),
        (3, 3, (1, 1), (((0,),), ((1,),))),
        (6, 6, (1, 1), (((0, 1, 2),), ((3, 4, 5),))),
        (8, 8, (1, 1), (((0, 1, 2),), ((4, 5, 6),))),  # four or more: one is left to the server's other processes
        (4, 2, (1, 1), (((0,),), ((1,),))),  # one thread of a physical core each
        (4, 2, (1, 1, 1, 1), (((0,),), ((1,),), ((2,),), ((3,),))),
        (4, 4, (2, 2), (((0,), (1,)), ((2,), (3,)))),
        (1, 1, (1, 1), (((0,),), ((0,),))),
        (2, 2, (1, 1, 1), (((0, 1),), ((0, 1),), ((0, 1),))),  # none of them is tied to a core that another one has
        (4, 2, (2, 2, 1), (((0, 1, 2, 3), (0, 1, 2, 3)),) * 2 + (((0, 1, 2, 3),),)),
    ],
)
def test_cores_are_split_evenly_and_shared_by_all_only_where_they_run_out(cores, physical, workers, expected) -> None:  # type: ignore[no-untyped-def]
    assert split_cores(machine(cores, physical=physical), workers) == expected


@pytest.mark.parametrize(
    ("free_gib", "servers", "expected_gib"), [(24, 2, 1), (20, 1, 2), (64, 2, 4), (512, 2, 32), (6, 2, 1)]
)
def test_kv_space_is_an_eighth_of_the_free_memory_shared(free_gib: int, servers: int, expected_gib: int) -> None:
    shares = share_cpu(
        machine(8, free=free_gib * GIB), workers=(1,) * servers, weight_bytes=GIB // 4, kv_space_gib=None
    )
    assert [share.kv_bytes / GIB for share in shares] == [expected_gib] * servers


@pytest.mark.parametrize("workers", [(1,), (1, 1), (1, 1, 1), (2, 1), (2, 2), (1,) * 5])
@pytest.mark.parametrize(("cores", "physical"), [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4)])
def test_workers_that_are_bound_never_meet_on_a_core(cores: int, physical: int, workers: tuple[int, ...]) -> None:
    """A worker that spins while it waits would keep another one that cannot leave its core from running."""
    shares = share_cpu(machine(cores, physical=physical), workers=workers, weight_bytes=0, kv_space_gib=0.5)
    assert len({share.shared for share in shares}) == 1
    used = [core for share in shares for worker in share.cores for core in worker]
    if shares[0].shared:
        assert sum(workers) > cores
        assert {(share.binding, share.threads) for share in shares} == {("nobind", 1)}
    else:
        assert len(set(used)) == len(used)
        assert all(share.threads is None for share in shares)


def test_a_binding_lists_the_cores_of_each_worker() -> None:
    (share,) = share_cpu(machine(4), workers=(2,), weight_bytes=0, kv_space_gib=0.5)
    assert share.binding == "0,1|2,3"
    assert share.kv_bytes == GIB // 2


def test_too_little_memory_is_refused_with_figures_and_what_would_fit() -> None:
    with pytest.raises(ResourceError, match=r"2 server\(s\) need 23\.5 GiB .* 16\.0 GiB are free") as caught:
        share_cpu(machine(2, free=16 * GIB), workers=(1, 1), weight_bytes=0, kv_space_gib=10)
    assert caught.value.remedy == "Give --kv-space 6.2 or less."
    with pytest.raises(ResourceError) as caught:
        share_cpu(machine(2, free=2 * SERVER_OVERHEAD), workers=(1, 1), weight_bytes=GIB, kv_space_gib=None)
    assert "smaller model" in caught.value.remedy


@pytest.mark.parametrize("wanted", [0, -1])
def test_no_kv_space_is_no_kv_space(wanted: float) -> None:
    with pytest.raises(ResourceError, match="more than 0"):
        share_cpu(machine(2), workers=(1,), weight_bytes=0, kv_space_gib=wanted)


@pytest.mark.parametrize(
    ("count", "workers", "expected"),
    [
        (2, (1, 1), [(("0",), 0.9), (("1",), 0.9)]),
        (4, (2, 2), [(("0", "1"), 0.9), (("2", "3"), 0.9)]),
        (1, (1, 1), [(("0",), 0.45), (("0",), 0.45)]),
        (2, (2, 2), [(("0", "1"), 0.45), (("0", "1"), 0.45)]),
        (2, (1, 1, 1), [(("0",), 0.45), (("1",), 0.9), (("0",), 0.45)]),
    ],
)
def test_gpus_are_whole_while_they_last_and_divided_after_that(count, workers, expected) -> None:  # type: ignore[no-untyped-def]
    assert [(share.gpus, share.utilisation) for share in share_gpus(gpus(count), workers=workers)] == expected


def test_more_workers_than_gpus_is_refused() -> None:
    with pytest.raises(ResourceError, match="4 workers needs as many GPUs, and 2"):
        share_gpus(gpus(2), workers=(4,))
