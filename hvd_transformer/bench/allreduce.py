"""Allreduce over message sizes: our communication layer beside raw MPI and torch.distributed.

Bandwidths are those of NCCL's tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). The algorithm bandwidth is the
message's bytes per second. The bus bandwidth is that × 2 (P - 1) / P for P ranks: what each rank sends in a ring. It
does not depend on P and compares with the speed of the link.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import cast

import torch
from torch import Tensor

from hvd_transformer.bench.device import free_bytes
from hvd_transformer.bench.sizes import ITEM, show_size
from hvd_transformer.bench.timing import LEAST, mean_over_ranks, repeats, series, slowest, synchronize, warm_up
from hvd_transformer.comm.raw_mpi import RawMpi, load_mpi
from hvd_transformer.comm.torch_group import TorchWorld
from hvd_transformer.comm.world import World, agree
from hvd_transformer.errors import UserError
from hvd_transformer.planning.constants import Backend, Link, Scope

OURS, RAW_MPI = "ours", "raw MPI"
# The libraries are measured in turn, so that what else the machine does meets all of them.
_ROUNDS = 3
# A size is left out if two warm-up calls and the fewest repeats of one library would take this much longer than asked.
_PATIENCE = 10
# Of the free memory of a device, for the ranks' messages and the libraries' copies of them.
_MEMORY_SHARE, _COPIES = 0.5, 3
# The size at which the bandwidth of a link is taken: that of a gradient bucket (communication.bucket_mb).
_BUCKET = 8 << 20
# A link has constants if there is a size of at most `_SMALL`, for its latency, and another of at least `_LARGE`.
_SMALL, _LARGE = 4 << 10, 1 << 20

AllReduce = Callable[[Tensor], object]


@dataclass(frozen=True)
class SizeResult:
    """One size: seconds by library, the median over the repeats of the slowest rank."""

    size: int  # bytes
    seconds: dict[str, float]
    repeats: dict[str, int]
    cpu_seconds: float  # of one rank, per allreduce of ours: the mean over the ranks


@dataclass(frozen=True)
class AllReduceResult:
    """All sizes that were measured. `notes` say what was left out, and why."""

    ranks: int
    hosts: int
    backend: Backend  # of our layer
    device: str
    libraries: list[str]
    sizes: list[SizeResult]
    notes: list[str] = field(default_factory=list)

    @property
    def scope(self) -> Scope:
        """Whether the ranks of one host or several hosts were measured."""
        return "host" if self.hosts == 1 else "network"


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Bytes per second of the message."""
    return size / seconds


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each rank sends in a ring."""
    return bytes_sent(size, ranks) / seconds


def bytes_sent(size: int, ranks: int) -> float:
    """Bytes that each rank sends in a ring allreduce: scatter and gather of (P - 1) / P of the message each."""
    return 2 * (ranks - 1) / ranks * size


def bench_allreduce(world: World, device: torch.device, sizes: Sequence[int], seconds: float) -> AllReduceResult:
    """Measure every size for about `seconds` per library. Collective. The world has several ranks.

    Raises `UserError` on all ranks if no size can be measured.
    """
    libraries, closes, notes = _libraries(world, device)
    found: list[SizeResult] = []
    fits = _fitting(world, device)
    for size in sizes:
        if size > fits:
            notes.append(f"{show_size(size)} and above: left out, as the memory does not suffice")
            break
        if too_long := _too_long(found, size, seconds):
            notes.append(f"{show_size(size)} and above: left out, as {too_long}")
            break
        found.append(_measure(world, device, size, libraries, seconds))
    for close in closes:
        close()
    agree(world, lambda: _check_some(found, sizes))
    hosts, backend = len(set(world.hosts)), cast(Backend, world.backend_for(device))
    return AllReduceResult(world.size, hosts, backend, device.type, list(libraries), found, notes)


def link_of(result: AllReduceResult) -> Link | None:
    """The constants of our layer's link, for `plan`; None unless small and large sizes were measured.

    A ring takes 2 (P - 1) messages: the latency is that part of the smallest allreduce, and the bandwidth what is left
    of the time of a gradient bucket, or of the largest size below.
    """
    ranks, smallest = result.ranks, result.sizes[0]
    bucket = max((row for row in result.sizes if row.size <= _BUCKET), key=lambda row: row.size, default=smallest)
    transfer = bucket.seconds[OURS] - smallest.seconds[OURS]
    if smallest.size > _SMALL or bucket.size < _LARGE or transfer <= 0:
        return None
    sent = bytes_sent(bucket.size, ranks)
    found = {
        "latency": smallest.seconds[OURS] / (2 * (ranks - 1)),
        "bandwidth": sent / transfer,
        "cpu_seconds_per_byte": 0.0 if result.device == "cuda" else bucket.cpu_seconds / sent,
    }
    return Link.model_validate(found)


def _libraries(world: World, device: torch.device) -> tuple[dict[str, AllReduce], list[Callable[[], None]], list[str]]:
    """What to compare, by name; what ends them; and why some are missing. Collective."""
    libraries: dict[str, AllReduce] = {OURS: lambda tensor: world.all_reduce_(tensor, f"bench.{tensor.numel()}")}
    closes: list[Callable[[], None]] = []
    notes: list[str] = []
    if device.type == "cpu" and world.backend == "mpi":
        try:
            mpi = RawMpi(agree(world, load_mpi))
            libraries[RAW_MPI] = mpi.all_reduce_
            closes.append(mpi.close)
        except UserError as error:
            notes.append(f"{RAW_MPI}: left out: {error}")
    elif device.type == "cpu":
        notes.append(f"{RAW_MPI}: left out, as the ranks run over {world.backend}; start them with --mpi")
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        torch_world = TorchWorld(world, world, backend, [device])
        (group,) = torch_world.communicators
        libraries[f"torch {backend}"] = lambda tensor: group.all_reduce_async_(tensor, "bench.torch")()
        closes.append(torch_world.close)
    except UserError as error:
        notes.append(f"torch {backend}: left out: {error}")
    return libraries, closes, notes


def _measure(
    world: World, device: torch.device, size: int, libraries: dict[str, AllReduce], seconds: float
) -> SizeResult:
    """One size. Raises `AssertionError` if a library's sum is wrong. Collective."""
    tensor = world.zeros_like(torch.empty(size // ITEM, device=device))  # as gradients are
    counts, calls = {}, {}
    for name, all_reduce_ in libraries.items():
        _check_sum(world, tensor, name, all_reduce_)
        calls[name] = lambda all_reduce_=all_reduce_: all_reduce_(tensor)
        estimate = warm_up(world, calls[name], device)
        counts[name] = -(-repeats(seconds, estimate) // _ROUNDS)  # in each round
    times: dict[str, list[float]] = {name: [] for name in libraries}
    cpu = 0.0
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            began = time.process_time()  # of all threads, also of Horovod's
            times[name] += series(world, call, device, counts[name])
            cpu += time.process_time() - began if name == OURS else 0.0
    return SizeResult(
        size=size,
        seconds={name: median(slowest(world, own)) for name, own in times.items()},
        repeats={name: len(own) for name, own in times.items()},
        cpu_seconds=mean_over_ranks(world, cpu / len(times[OURS])),
    )


def _check_sum(world: World, tensor: Tensor, name: str, all_reduce_: AllReduce) -> None:
    """Leaves the tensor zero, whose sums stay zero."""
    tensor.fill_(world.rank + 1)
    all_reduce_(tensor)
    synchronize(tensor.device)
    wanted = world.size * (world.size + 1) / 2
    assert bool((tensor == wanted).all()), f"{name}: a sum over {world.size} ranks is not {wanted}"
    tensor.zero_()


def _fitting(world: World, device: torch.device) -> float:
    """The largest message in bytes for which the ranks have memory, equal on all. Collective."""
    sharing = world.local_size if device.type == "cpu" else 1
    own = _MEMORY_SHARE * free_bytes(device) / sharing / _COPIES
    return float(world.all_reduce_(torch.tensor([own], dtype=torch.float64), "bench.memory", "min"))


def _too_long(found: Sequence[SizeResult], size: int, seconds: float) -> str | None:
    """Why the next size would take too long on this link, judged by the last two; None if it does not."""
    if len(found) < 2:
        return None
    before, last = found[-2:]
    growth = [(last.seconds[name] - before.seconds[name]) / (last.size - before.size) for name in last.seconds]
    expected = max(last.seconds.values()) + max(0.0, *growth) * (size - last.size)
    if (LEAST + 2) * expected <= _PATIENCE * seconds:
        return None
    return f"one allreduce would take about {expected:.1f} s; --seconds {seconds:g} is too short for it"


def _check_some(found: Sequence[SizeResult], sizes: Sequence[int]) -> None:
    if not found:
        raise UserError(f"--sizes: the memory of this machine does not suffice for {show_size(sizes[0])}")
