"""This rank's place from the launcher's environment variables, and defaults for Horovod's variables."""

import math
import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from hvd_transformer.control_groups import control_groups

# The variables of rank, world size and ranks on this host. Of srun those of a step: a batch script has its job's.
_LAUNCHERS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),  # with gloo
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI's
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH's and Intel MPI's
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # others set RANK, too
# What rank 0 does per cycle and rank: it reads one message and writes one. An estimate, as for sockets.
_SECONDS_PER_RANK = 10e-6


class Launched(NamedTuple):
    """The place of this process in the job, as told by its launcher ("": it has none)."""

    rank: int
    size: int
    local_size: int
    launcher: str = ""


def launched() -> Launched:
    """Rank, world size and number of ranks on this host; (0, 1, 1) if no launcher started this process."""
    for launcher, (rank, size, local_size) in _LAUNCHERS.items():
        if rank in os.environ and size in os.environ and (launcher != "torchrun" or _TORCHRUN in os.environ):
            world = os.environ[size]
            # Slurm's is such as 4(x2),3: four on each of two hosts and three on another one.
            here = max(map(int, re.findall(r"(?:^|,)(\d+)", os.environ.get(local_size, world))))
            return Launched(int(os.environ[rank]), int(world), here, launcher)
    return Launched(0, 1, 1)


def cannot_join(place: Launched) -> str | None:
    """Why Horovod cannot find the other ranks that the launcher started; None if it can."""
    otherwise = f"hvd-transformer launch -np {place.size} or horovodrun -np {place.size}"
    if place.launcher == "torchrun":
        return f"started by torchrun, which Horovod does not work with; use {otherwise}"
    if place.launcher == "srun" and "PMIX_RANK" not in os.environ:
        return f"started by srun without PMIx, through which MPI finds the ranks; use srun --mpi=pmix, or {otherwise}"
    return None


def cycle_milliseconds(size: int, *, gloo: bool, prompt: bool, on_gpu: bool, wakes_up: bool) -> float:
    """How long Horovod's background thread sleeps at most between two cycles, in each of which `size` ranks negotiate.

    Our Horovod starts a cycle when something is enqueued. Published Horovod always sleeps that long, and each cycle
    costs CPU, more so over gloo's sockets: measured on two cores that also compute (benchmarks/RESULTS.md). Beside a
    GPU the cores are free, and Horovod's own default is right. With many ranks the sleep is as long as the work of
    rank 0 in a cycle, so that its thread is busy half of the time at most.
    """
    if wakes_up:
        return 100
    shortest = 0.5 if prompt else 1 if on_gpu else 10 if gloo else 2
    return max(shortest, 2 * size * _SECONDS_PER_RANK * 1e3)


def set_defaults(
    local_size: int, stall_seconds: float | None = None, *, size: int = 1, prompt: bool = False, on_gpu: bool = False
) -> None:
    """Set defaults for unset variables of Horovod and Open MPI, tuned for gradient buckets. Call before `hvd.init`.

    `stall_seconds`: `training.stall_seconds`, if the user set it. `size`: number of ranks. `prompt`: layers wait for
    collectives (tensor parallelism). `on_gpu`: this host has GPUs to compute on.
    """
    gloo = os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"  # set by horovodrun, not by mpirun
    cycle = cycle_milliseconds(size, gloo=gloo, prompt=prompt, on_gpu=on_gpu, wakes_up=horovod_wakes_up())
    stall = stall_seconds or 0.0
    defaults = {
        # Gradients arrive in flat buckets: fusing them again would only copy. What is fused also depends on timing,
        # which with more than two ranks changes the order of the sums, so that runs would not repeat bit for bit.
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": f"{cycle:g}",
        # How long gloo waits for ranks that do not answer. Its 30 seconds are too short for many hosts, a slow start
        # and storage that stands still.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(round(max(600, 1.5 * stall))),
        # By default Horovod only warns about a stalled tensor. This limit is longer than the watchdog's, whose report
        # is more specific (`monitoring/watchdog.py`): it catches jobs whose watchdogs have all ended.
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(round(max(900, 1.5 * stall))),
    }
    if on_gpu:
        # A collective on GPUs ends as an event for other streams (`comm/streams.py`); otherwise a thread of Horovod's
        # waits for it, and so does the thread that wants the result. It changes nothing for tensors on the CPU.
        defaults["HOROVOD_ENABLE_ASYNC_COMPLETION"] = "1"
    if local_size >= usable_cores():
        # Open MPI spins while it waits, which would slow down the backward of ranks that share the cores.
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if os.environ.get("HOROVOD_AUTOTUNE") == "1":  # it only tunes variables that are not set
        del defaults["HOROVOD_FUSION_THRESHOLD"], defaults["HOROVOD_CYCLE_TIME"]
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def horovod_wakes_up() -> bool:
    """Whether Horovod was built by docker/build_horovod.sh, with the patch that wakes its thread when something is
    enqueued and makes its waits sleep."""
    try:
        return version("horovod").endswith("+wakeup")
    except PackageNotFoundError:
        return False


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on, and for which its control groups give it time: a container's CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, _cpu_quota(root)))


def _cpu_quota(root: Path) -> float:
    """Seconds of CPU time per second that the control groups of this process allow; infinite without a limit.

    `launch/node/probe.py` has the same for other hosts.
    """
    quotas = [math.inf]
    for group, number in control_groups("cpu", root):
        names = ("cpu.max",) if number == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # no such group, or "max"
            quota, period = map(int, " ".join((group / name).read_text(encoding="ascii") for name in names).split())
            quotas += [quota / period] * (quota > 0 and period > 0)  # -1: no limit
    return min(quotas)
