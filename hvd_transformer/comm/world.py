"""The world of all ranks; without a launcher, a world of one that needs no Horovod."""

import os
import socket
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar, cast

import torch

from hvd_transformer.comm.group import Group, Link
from hvd_transformer.comm.horovod_env import cannot_join, horovod_wakes_up, launched, set_defaults, usable_cores
from hvd_transformer.comm.shared_buffers import SharedBuffers
from hvd_transformer.errors import UserError

Result = TypeVar("Result")


class AgreedError(UserError):
    """A `UserError` that all ranks raise alike; only rank 0 prints it. `rank` is the one that it is about."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class World(Group):
    """All ranks of the job."""

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.hosts = [self.host]  # the host of each rank
        self.link = Link(None, f"rank 0 on {self.host}")
        super().__init__(self.link, [0], 0)
        self.local_rank, self.local_size = 0, 1
        self.backend = "none"
        self._process_sets: dict[tuple[int, ...], Any] = {}

    @classmethod
    def start(cls, stall_seconds: float | None = None, groups: Sequence[Sequence[int]] = ()) -> "World":
        """Join the ranks that this process's launcher started; without a launcher, a world of one.

        Horovod's own time limits are set to at least `stall_seconds`. `groups` lists the process sets, each smaller
        than the world; it must be the same on all ranks, because Horovod has every rank create every set.

        Raises `UserError` if ranks were launched but Horovod is not installed or cannot start.
        """
        world = cls()
        place = launched()
        if "OMP_NUM_THREADS" not in os.environ:  # torch would give every rank all cores of its host
            torch.set_num_threads(max(1, usable_cores() // place.local_size))
        if place.size == 1:
            return world
        if (why := cannot_join(place)) is not None:
            raise UserError(why)
        on_gpu = torch.cuda.is_available()
        set_defaults(place.local_size, stall_seconds, size=place.size, prompt=bool(groups), on_gpu=on_gpu)
        try:
            import horovod.torch as hvd
        except ImportError as error:
            raise UserError(
                f"started as one of {place.size} ranks, but Horovod cannot be imported ({error}); "
                "build it with docker/build_horovod.sh"
            ) from None
        world._process_sets = {tuple(group): hvd.ProcessSet(list(group)) for group in groups if len(group) > 1}
        try:
            hvd.init(process_sets=list(world._process_sets.values()))
        except ValueError as error:  # for example different groups on another rank; the message says which
            raise UserError(f"{error} Every rank needs the same parallel.tensor") from None
        if hvd.size() != place.size:  # each process would train alone, and all would write the same run directory
            found = hvd.size()
            hvd.shutdown()
            raise UserError(
                f"{place.launcher} started {place.size} ranks, but MPI finds {found}: it is not the MPI that Horovod "
                "was built with"
            )
        world.rank, world.ranks, world.size = hvd.rank(), list(range(hvd.size())), hvd.size()
        world.local_rank, world.local_size = hvd.local_rank(), hvd.local_size()
        world.backend = "mpi" if hvd.mpi_enabled() else "gloo"
        world.link.horovod, world.link.who = hvd, f"rank {world.rank} on {world.host}"
        world.link.waits_asleep = horovod_wakes_up()
        world.hosts = world._find_hosts()
        if len(set(world.hosts)) == 1:
            world.link.shared_buffers = SharedBuffers.find(hvd)
        # Over gloo published Horovod's reduce-scatter takes up to twice the CPU of its allreduce; between hosts
        # bandwidth counts. Within a host ours goes through shared memory (docker/patches/within_host.patch).
        world.link.gloo = world.backend == "gloo"
        world.link.sums_whole = world.link.gloo and len(set(world.hosts)) == 1 and not horovod_wakes_up()
        return world

    def _find_hosts(self) -> list[str]:
        """The host of each rank. All ranks get a number per rank, and each host's name once."""
        own = int.from_bytes(blake2b(self.host.encode(), digest_size=8).digest(), "big", signed=True)
        numbers = self.all_gather_async(torch.tensor([own]), "hosts")().tolist()
        found = self.gather_objects(self.host if numbers.index(own) == self.rank else None)
        names = self.broadcast_object([name for name in found if name is not None])
        name_of = dict(zip(dict.fromkeys(numbers), names, strict=True))  # both in the order of the hosts' first ranks
        return [name_of[number] for number in numbers]

    def group(self, ranks: Sequence[int], *, prompt: bool = False) -> Group:
        """A group with this rank in it: the whole world, this rank alone, or one of the `groups` of `start`."""
        process_set = self._process_sets[tuple(ranks)] if 1 < len(ranks) < self.size else None
        return Group(self.link, ranks, list(ranks).index(self.rank), process_set, prompt=prompt)

    @property
    def sends_from_gpus(self) -> bool:
        """Whether Horovod was built to send from a GPU's memory: with NCCL, or through an MPI that knows CUDA."""
        hvd = self.link.horovod
        if hvd is None:
            return False
        return bool(hvd.nccl_built()) or (hvd.mpi_enabled() and (hvd.cuda_built() or hvd.rocm_built()))

    @property
    def bytes_of_others(self) -> int:
        """Other ranks' memory in this process's resident set."""
        buffers = self.link.shared_buffers
        return 0 if buffers is None else buffers.bytes_of_others

    def backend_for(self, device: torch.device) -> str:
        """The library that sums tensors of the device: nccl, if Horovod was built with it, gloo, mpi or none."""
        hvd = self.link.horovod
        return "nccl" if hvd is not None and device.type == "cuda" and hvd.nccl_built() else self.backend

    def close(self) -> None:
        """Shut Horovod down; all ranks must call it."""
        if self.link.horovod is not None:
            self.barrier()
            self.link.horovod.shutdown()
            self.link.horovod = None


def agree(world: World, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank and return its result. A `UserError` of any rank is raised on all of them.

    `action` must not call collectives after a point where it can fail. Costs one number where no rank fails; otherwise
    the first such rank's message is sent to all.
    """
    result: Result | None = None
    message = None
    try:
        result = action()
    except AgreedError:
        raise
    except UserError as error:
        message = str(error)
    if (failed := world.first_object(message)) is not None:
        rank, told = failed
        raise AgreedError(told if rank == 0 else f"rank {rank}: {told}", rank)
    return cast(Result, result)
