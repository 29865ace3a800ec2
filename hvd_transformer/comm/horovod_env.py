"""What the launcher's environment variables say, and good values for Horovod's own where the user set none."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

# One family a launcher: horovodrun with gloo, Open MPI's mpirun (horovodrun with MPI too), MPICH and Intel MPI.
_FAMILIES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


class Launched(NamedTuple):
    """This process's place, as its launcher told it."""

    rank: int
    size: int
    local_size: int


def launched() -> Launched:
    """Rank, world size and ranks on this host; (0, 1, 1) when no launcher started this process."""
    for rank, size, local_size in _FAMILIES:
        if rank in os.environ and size in os.environ:
            return Launched(
                int(os.environ[rank]),
                int(os.environ[size]),
                int(os.environ.get(local_size, os.environ[size])),
            )
    return Launched(0, 1, 1)


def set_defaults(local_size: int, stall_seconds: float | None = None, *, prompt: bool = False) -> None:
    """Sets Horovod's and Open MPI's variables where the user set none. Call before `hvd.init`.

    `stall_seconds`: what a rank may be silent at most, if the user set it. `prompt`: layers wait for collectives.
    """
    gloo = os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"  # as horovodrun says; mpirun says nothing
    published_cycle = "0.5" if prompt else "10" if gloo else "2"
    stall = stall_seconds or 0.0
    defaults = {
        # Gradients arrive in flat buckets, so fusing them again would only copy; and what is fused depends on
        # timing, which with more than two ranks changes the order of the sums: runs would not repeat bit for bit.
        "HOROVOD_FUSION_THRESHOLD": "0",
        # Milliseconds between two rounds of messages. Our Horovod starts one when something is enqueued, and this is
        # only the longest wait of an idle rank. Published Horovod sleeps that long whatever is enqueued, and each
        # round costs CPU, more over gloo's sockets. Measured on two cores: benchmarks/RESULTS.md.
        "HOROVOD_CYCLE_TIME": "100" if horovod_wakes_up() else published_cycle,
        # gloo's 30 seconds are too short for many hosts or a slow first step. It waits for ranks that do not answer.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(round(max(300, 1.5 * stall))),
        # By default Horovod only warns of a stalled tensor. Behind the watchdog's limits, which say more
        # (`training/watchdog.py`): for ranks of which none has a watchdog any more.
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(round(max(900, 1.5 * stall))),
    }
    if local_size >= usable_cores():
        # Open MPI spins while it waits; ranks that share cores would take them from each other's backward.
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if os.environ.get("HOROVOD_AUTOTUNE") == "1":  # it searches among what nobody has set
        del defaults["HOROVOD_FUSION_THRESHOLD"], defaults["HOROVOD_CYCLE_TIME"]
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def horovod_wakes_up() -> bool:
    """Whether the installed Horovod is that of docker/build_horovod.sh: patched to start when something is enqueued,
    and to wait asleep."""
    try:
        return version("horovod").endswith("+wakeup")
    except PackageNotFoundError:
        return False


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
