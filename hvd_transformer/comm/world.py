"""The world of ranks and its collectives over Horovod; without a launcher, a world of one that needs none."""

import json
import os
import socket
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from hvd_transformer.comm.environment import launched, set_defaults, usable_cores
from hvd_transformer.errors import UserError

Result = TypeVar("Result")
# Between two looks at a collective that has not ended.
POLL_SECONDS = 0.0005
Operation = Literal["sum", "min", "max"]


class PeerLost(RuntimeError):
    """A collective could not end because another rank has gone."""


class AgreedError(UserError):
    """A `UserError` that every rank raises alike: rank 0 alone has to show it."""


class World:
    """All ranks of the job, as one of them sees it.

    Every collective must be called by all ranks; the asynchronous ones with the same names. `waiting` holds the names
    of those that this rank waits for at this moment, `ended` counts those that it has waited for: another thread may
    read both.
    """

    def __init__(self) -> None:
        self._horovod: ModuleType | None = None
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        self.backend = "none"
        self.host = socket.gethostname()
        self.hosts = [self.host]  # of all ranks
        self.waiting: dict[str, None] = {}
        self.ended = 0

    @classmethod
    def start(cls, stall_seconds: float | None = None) -> "World":
        """Joins the ranks that this process's launcher started, or is a world of one.

        Horovod's own limits are not shorter than `stall_seconds`, which a rank may be silent.

        Raises `UserError` where ranks were launched but Horovod is not installed.
        """
        world = cls()
        place = launched()
        _share_cores(place.local_size)
        if place.size == 1:
            return world
        set_defaults(place.local_size, stall_seconds)
        try:
            import horovod.torch as hvd
        except ImportError as error:
            raise UserError(
                f"started as one of {place.size} ranks, but Horovod cannot be imported ({error}); "
                "build it with docker/build_horovod.sh"
            ) from None
        hvd.init()
        world._horovod = hvd
        world.rank, world.size = hvd.rank(), hvd.size()
        world.local_rank, world.local_size = hvd.local_rank(), hvd.local_size()
        world.backend = "mpi" if hvd.mpi_enabled() else "gloo"
        world.hosts = world.all_gather_objects(world.host)
        return world

    def all_reduce_async_(self, tensor: Tensor, name: str, operation: Operation = "sum") -> Callable[[], None]:
        """Reduces a contiguous tensor over the ranks, in place; returns the function that waits for the end."""
        hvd = self._horovod
        if hvd is None:
            return _done
        kinds = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        handle = self._guard(lambda: hvd.allreduce_async_(tensor, name=name, op=kinds[operation]))
        return lambda: self._wait(handle, name)

    def all_reduce_(self, tensor: Tensor, name: str, operation: Operation = "sum") -> Tensor:
        """Reduces a contiguous tensor over the ranks, in place, and waits."""
        self.all_reduce_async_(tensor, name, operation)()
        return tensor

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Joins the ranks' contiguous tensors along their first dimension, whose size may differ between ranks.

        Returns the function that waits for the result: all ranks' parts, in rank order.
        """
        hvd = self._horovod
        if hvd is None:
            return lambda: tensor
        handle = self._guard(lambda: hvd.allgather_async(tensor, name=name))
        return lambda: cast(Tensor, self._wait(handle, name))

    def broadcast_(self, tensor: Tensor, name: str, root: int = 0) -> Tensor:
        """Overwrites a contiguous tensor with the root's."""
        hvd = self._horovod
        if hvd is not None:
            self._wait(self._guard(lambda: hvd.broadcast_async_(tensor, root_rank=root, name=name)), name)
        return tensor

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, in rank order. Travels as JSON: nothing is unpickled."""
        if self._horovod is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        sizes = self.all_gather_async(size, "objects.sizes")().tolist()
        joined = self.all_gather_async(data, "objects.bytes")()
        return [json.loads(bytes(part.tolist())) for part in joined.split(sizes)]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's JSON-able value."""
        return self.all_gather_objects(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.all_reduce_(torch.zeros(1), "barrier")

    def close(self) -> None:
        """Leaves the world in good order: all ranks must call it."""
        hvd = self._horovod
        if hvd is not None:
            self.barrier()
            hvd.shutdown()
            self._horovod = None

    def _wait(self, handle: Any, name: str) -> Any:
        """The result of an asynchronous collective.

        Horovod's own wait spins; asleep, this rank leaves its core to the others and to its own transfer.
        """
        hvd = self._horovod
        assert hvd is not None
        self.waiting[name] = None
        while not hvd.poll(handle):
            time.sleep(POLL_SECONDS)
        result = self._guard(lambda: hvd.synchronize(handle))
        del self.waiting[name]
        self.ended += 1
        return result

    def _guard(self, action: Callable[[], Any]) -> Any:
        assert self._horovod is not None
        from horovod.common.exceptions import HorovodInternalError

        try:
            return action()
        except HorovodInternalError as error:
            raise PeerLost(f"rank {self.rank} on {self.host} lost another rank: {error}") from None


def agree(world: World, action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank; a `UserError` of any rank is raised on all of them, so that all end alike.

    `action` may not wait for other ranks after it can fail.
    """
    result: Result | None = None
    message = None
    try:
        result = action()
    except UserError as error:
        message = str(error)
    for rank, failure in enumerate(world.all_gather_objects(message)):
        if failure is not None:
            raise AgreedError(failure if rank == 0 else f"rank {rank}: {failure}")
    return cast(Result, result)


def _share_cores(local_size: int) -> None:
    """One share of this host's cores a rank; without it every rank would use them all."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // local_size))


def _done() -> None:
    """Nothing to wait for."""
