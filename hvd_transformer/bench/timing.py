"""Times what ranks do together: warm-up, a number of repeats that fits into the time, the slowest rank of each."""

import time
from collections.abc import Callable
from statistics import mean, median, pstdev

import torch

from hvd_transformer.comm.group import Group
from hvd_transformer.planning.scaling.step_time import slowest_of

LEAST, MOST = 3, 1000  # repeats


def call_seconds(action: Callable[[], object], device: torch.device) -> float:
    """The time of one call, with all that it queued on a GPU."""
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(group: Group, action: Callable[[], object], device: torch.device) -> float:
    """Call the action twice; return the seconds of the second call on the slowest rank, equal on all. Collective.

    The first call connects ranks, allocates memory and chooses kernels.
    """
    call_seconds(action, device)
    group.barrier()
    return slowest(group, [call_seconds(action, device)])[0]


def repeats(seconds: float, estimate: float) -> int:
    """How many calls of `estimate` seconds each fit into `seconds`, within limits."""
    return min(max(int(seconds / max(estimate, 1e-9)), LEAST), MOST)


def series(group: Group, action: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """The seconds of `count` calls in a row on this rank. Ranks begin together. Collective."""
    group.barrier()
    return [call_seconds(action, device) for _ in range(count)]


def slowest(group: Group, seconds: list[float]) -> list[float]:
    """The seconds of each call on its slowest rank, equal on all ranks. Collective."""
    found: list[float] = group.all_reduce_(torch.tensor(seconds, dtype=torch.float64), "bench.slowest", "max").tolist()
    return found


def mean_over_ranks(group: Group, value: float) -> float:
    """The mean of the ranks' values, equal on all ranks. Collective."""
    return float(group.all_reduce_(torch.tensor([value], dtype=torch.float64), "bench.mean")) / group.size


def relative_deviation(seconds: list[float]) -> float:
    """The standard deviation of the values, divided by their mean."""
    return pstdev(seconds) / mean(seconds)


def rank_jitter(group: Group, seconds: list[float]) -> float:
    """The standard deviation of the ranks' steps / their mean, from how long the slowest rank of each step takes.

    What slows all ranks down at the same time does not count: nobody waits for it. The median, so that a few steps that
    are held up do not decide. Equal on all ranks. Collective.
    """
    own = torch.tensor(seconds, dtype=torch.float64)
    means: list[float] = (group.all_reduce_(own, "bench.means") / group.size).tolist()
    longer = [most / of_all - 1 for most, of_all in zip(slowest(group, seconds), means, strict=True)]
    return float(median(longer)) / slowest_of(group.size)
