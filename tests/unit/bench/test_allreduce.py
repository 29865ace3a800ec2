"""Bandwidths as NCCL's tests define them, the constants of a link, and which sizes are left out."""

import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from thread_world import make_worlds, on_ranks

from hvd_transformer.bench import allreduce
from hvd_transformer.bench.allreduce import (
    OURS,
    AllReduceResult,
    SizeResult,
    algorithm_bandwidth,
    bench_allreduce,
    bus_bandwidth,
    link_of,
)
from hvd_transformer.comm.raw_mpi import RawMpi, load_mpi
from hvd_transformer.comm.torch_group import _address, _interface
from hvd_transformer.errors import UserError

CPU = torch.device("cpu")


def test_bandwidths_are_those_of_nccl_s_tests() -> None:
    """nccl-tests, doc/PERFORMANCE.md: algbw = S/t, busbw = algbw × 2 (n - 1) / n."""
    assert algorithm_bandwidth(128 << 20, 0.5) == 256 << 20
    assert bus_bandwidth(128 << 20, 0.5, 2) == 256 << 20  # one half there, one half back
    assert bus_bandwidth(128 << 20, 0.5, 8) == 1.75 * (256 << 20)


def result(ranks: int, seconds: dict[int, float], device: str = "cpu") -> AllReduceResult:
    rows = [SizeResult(size, {OURS: own}, {OURS: 3}, cpu_seconds=own / 4) for size, own in seconds.items()]
    return AllReduceResult(ranks, 1, "gloo", device, [OURS], rows)


def test_constants_of_a_link_are_those_of_the_ring_that_gave_the_times() -> None:
    """Of a ring with latency a and bandwidth b: t = 2 (P - 1) (a + S / P / b)."""
    latency, bandwidth, ranks = 5e-5, 1e9, 4
    times = {size: 2 * (ranks - 1) * (latency + size / ranks / bandwidth) for size in (4, 1 << 16, 8 << 20, 64 << 20)}
    link = link_of(result(ranks, times))
    assert link is not None
    assert link.latency == pytest.approx(latency, rel=1e-4)
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-4)
    sent = 2 * (ranks - 1) / ranks * (8 << 20)
    assert link.cpu_seconds_per_byte == pytest.approx(times[8 << 20] / 4 / sent)
    on_gpu = link_of(result(ranks, times, "cuda"))
    assert on_gpu is not None and on_gpu.cpu_seconds_per_byte == 0


@pytest.mark.parametrize("times", [{1 << 20: 1.0, 8 << 20: 2.0}, {1024: 1.0, 4096: 2.0}, {1024: 2.0, 1 << 20: 1.0}])
def test_no_constants_without_a_small_and_a_large_size(times: dict[int, float]) -> None:
    assert link_of(result(2, times)) is None


def measured(sizes: list[int], free: float = 1e9, seconds: float = 0.001) -> AllReduceResult:
    """By two ranks that are threads; their layer is the only library."""

    def libraries(world, device):
        return {OURS: lambda tensor: world.all_reduce_(tensor, "bench")}, [], []

    worlds = make_worlds(2)
    for world in worlds:
        world.backend = "gloo"
        world.link.horovod.nccl_built = lambda: False
    with patch.object(allreduce, "_libraries", libraries), patch.object(allreduce, "free_bytes", lambda device: free):
        found = on_ranks(worlds, lambda world: bench_allreduce(world, CPU, sizes, seconds))
    if isinstance(found[0], BaseException):
        raise found[0]
    assert isinstance(found[0], AllReduceResult) and isinstance(found[1], AllReduceResult)
    assert [row.seconds for row in found[0].sizes] == [row.seconds for row in found[1].sizes]
    return found[0]


def test_every_size_is_measured_by_all_ranks() -> None:
    found = measured([4, 1024])
    assert [row.size for row in found.sizes] == [4, 1024]
    assert (found.ranks, found.hosts, found.scope, found.notes) == (2, 1, "host", [])
    assert all(row.seconds[OURS] > 0 and row.repeats[OURS] >= 3 for row in found.sizes)


def test_a_size_without_memory_is_left_out() -> None:
    assert measured([1024, 4096], free=6 * 1024).notes == ["4K and above: left out, as the memory does not suffice"]
    with pytest.raises(UserError, match=r"--sizes: the memory of this machine does not suffice for 1K"):
        measured([1024], free=10)


def test_a_size_that_takes_too_long_is_left_out() -> None:
    """A slow link: 1 ms and 1 µs per byte."""
    rows = [SizeResult(size, {OURS: 1e-3 + 1e-6 * size}, {OURS: 3}, 0.0) for size in (1024, 65536)]
    assert allreduce._too_long([], 1 << 30, 1) is None
    assert allreduce._too_long(rows[:1], 1 << 30, 1) is None  # of one size nobody can tell
    assert allreduce._too_long(rows, 1 << 20, 1) is None
    told = allreduce._too_long(rows, 4 << 20, 1)
    assert told == "one allreduce would take about 4.2 s; --seconds 1 is too short for it"


def test_a_library_with_a_wrong_sum_is_not_measured() -> None:
    (world, _) = make_worlds(2)
    with pytest.raises(AssertionError, match=r"torch gloo: a sum over 2 ranks is not 3"):
        allreduce._check_sum(world, torch.zeros(4), "torch gloo", lambda tensor: tensor.mul_(2))


def test_raw_mpi_needs_an_mpi_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(Is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace(), MPI=mpi))
    with pytest.raises(UserError, match="mpi4py uses another MPI than Horovod"):
        load_mpi()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match="mpi4py cannot be imported"):
        load_mpi()


def test_raw_mpi_sums_in_place_on_a_communicator_of_its_own() -> None:
    calls = []

    def sum_(in_place, array, operation) -> None:
        assert (in_place, operation) == ("in place", "sum")
        array *= 2

    own = SimpleNamespace(Allreduce=sum_, Free=lambda: calls.append("free"))
    mpi = RawMpi(SimpleNamespace(IN_PLACE="in place", SUM="sum", COMM_WORLD=SimpleNamespace(Dup=lambda: own)))
    tensor = torch.ones(3)
    mpi.all_reduce_(tensor)
    mpi.close()
    assert (tensor.tolist(), calls) == ([2.0] * 3, ["free"])


def test_torch_uses_the_interface_of_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include"):
        monkeypatch.delenv(name, raising=False)
    (world, _) = make_worlds(2)
    assert _interface(world) == "lo"  # one host
    world.hosts = ["h1", "h2"]
    assert _interface(world) is None  # torch's own choice
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "eth1,eth2")
    assert _interface(world) == "eth1"
    for subnet, interface in (
        ("127.0.0.0/8", "lo"),
        ("127.1.2.3/8,10.0.0.0/8", "lo"),
        ("240.0.0.0/28", None),
        ("x/y", None),
    ):
        monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", subnet)
        assert _interface(world) == interface
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth0")
    assert _interface(world) == "eth0"
    assert (_address("lo", "h1"), _address("none7", "h1"), _address(None, "h1")) == ("127.0.0.1", "h1", "h1")
