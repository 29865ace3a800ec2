"""Groups of ranks and their collectives over Horovod. A single rank needs no Horovod."""

import json
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, cast

import torch
from torch import Tensor

# Interval at which a pending collective is polled; `prompt` groups use the second one.
POLL_SECONDS = 0.0005
PROMPT_POLL_SECONDS = 0.00005
Operation = Literal["sum", "min", "max"]


class PeerLost(RuntimeError):
    """A collective failed because another rank is lost."""


class Link:
    """This process's connection to Horovod, shared by all of its groups.

    `sums_whole`: an allreduce is cheaper than a reduce-scatter. `waits_asleep`: Horovod's own wait sleeps; published
    Horovod spins. `gloo`: gloo runs the collectives. `waiting` holds the names of the collectives that this rank is
    waiting for, `ended` counts those that it has waited for; other threads may read both.
    """

    def __init__(self, horovod: ModuleType | None, who: str) -> None:
        self.horovod, self.who = horovod, who
        self.sums_whole = self.waits_asleep = self.gloo = False
        self.waiting: dict[str, None] = {}
        self.ended = 0

    def wait(self, handle: Any, name: str, poll_seconds: float) -> Any:
        """Waits for an asynchronous collective and returns its result. It sleeps while waiting: spinning would take the
        core from other ranks and from this rank's own transfers."""
        hvd = self.horovod
        assert hvd is not None
        self.waiting[name] = None
        while not self.waits_asleep and not hvd.poll(handle):
            time.sleep(poll_seconds)
        result = self.guard(lambda: hvd.synchronize(handle))
        del self.waiting[name]
        self.ended += 1
        return result

    def guard(self, action: Callable[[], Any]) -> Any:
        """Returns the result of `action`. Raises `PeerLost` if Horovod has lost a rank."""
        assert self.horovod is not None
        from horovod.common.exceptions import HorovodInternalError

        try:
            return action()
        except HorovodInternalError as error:
            raise PeerLost(f"{self.who} lost another rank: {error}") from None


class Group:
    """Some ranks of the job, as one of them sees it: `rank` and `size` count within the group.

    All ranks of the group must call every collective, the asynchronous ones with the same names. `prompt`: the results
    are needed immediately (tensor parallelism), so pending collectives are polled more often.
    """

    def __init__(
        self, link: Link, ranks: Sequence[int], rank: int, process_set: Any = None, *, prompt: bool = False
    ) -> None:
        self._link, self.ranks, self._set = link, list(ranks), process_set
        self.rank, self.size = rank, len(self.ranks)
        self._poll_seconds = PROMPT_POLL_SECONDS if prompt else POLL_SECONDS

    @property
    def _horovod(self) -> ModuleType | None:
        return None if self.size == 1 else self._link.horovod

    @property
    def _where(self) -> dict[str, Any]:
        return {} if self._set is None else {"process_set": self._set}

    def all_reduce_async_(self, tensor: Tensor, name: str, operation: Operation = "sum") -> Callable[[], None]:
        """Reduces a contiguous tensor over the ranks, in place; returns a function that waits for the end."""
        hvd = self._horovod
        if hvd is None:
            return _done
        kinds = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        handle = self._link.guard(lambda: hvd.allreduce_async_(tensor, name=name, op=kinds[operation], **self._where))
        return lambda: self._wait(handle, name)

    def all_reduce_(self, tensor: Tensor, name: str, operation: Operation = "sum") -> Tensor:
        """Reduces a contiguous tensor over the ranks, in place, and waits."""
        self.all_reduce_async_(tensor, name, operation)()
        return tensor

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Sums a contiguous 1-D tensor over the ranks and scatters it in equal parts, in rank order.

        Returns a function that waits for this rank's part. The tensor may be overwritten.
        """
        hvd = self._horovod
        if hvd is None:
            return lambda: tensor
        # Unless the number of ranks is a power of two, gloo's can return memory that another rank has already freed.
        if self._link.sums_whole or (self._link.gloo and self.size.bit_count() > 1):
            done = self.all_reduce_async_(tensor, name)

            def own() -> Tensor:
                done()
                return tensor.view(self.size, -1)[self.rank]

            return own
        parts = tensor.view(self.size, -1)
        handle = self._link.guard(lambda: hvd.reducescatter_async(parts, name=name, op=hvd.Sum, **self._where))
        return lambda: cast(Tensor, self._wait(handle, name)).flatten()

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Concatenates the ranks' contiguous tensors along the first dimension, whose size may differ between ranks.

        Returns a function that waits for the result, in rank order.
        """
        hvd = self._horovod
        if hvd is None:
            return lambda: tensor
        handle = self._link.guard(lambda: hvd.allgather_async(tensor, name=name, **self._where))
        return lambda: cast(Tensor, self._wait(handle, name))

    def broadcast_(self, tensor: Tensor, name: str, root: int = 0) -> Tensor:
        """Overwrites a contiguous tensor with that of rank `root` of this group."""
        hvd = self._horovod
        if hvd is not None:
            first = self.ranks[root]  # Horovod expects the rank in the world, even within a process set
            handle = self._link.guard(lambda: hvd.broadcast_async_(tensor, root_rank=first, name=name, **self._where))
            self._wait(handle, name)
        return tensor

    def all_gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. They travel as JSON: nothing is unpickled."""
        if self._horovod is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        sizes = self.all_gather_async(size, "objects.sizes")().tolist()
        joined = self.all_gather_async(data, "objects.bytes")()
        return [json.loads(part.numpy().tobytes()) for part in joined.split(sizes)]

    def broadcast_object(self, value: Any) -> Any:
        """The value of rank 0, which travels as JSON."""
        return self.all_gather_objects(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        """Waits until every rank of the group has called it."""
        self.all_reduce_(torch.zeros(1), "barrier")

    def _wait(self, handle: Any, name: str) -> Any:
        return self._link.wait(handle, name, self._poll_seconds)


def _done() -> None:
    """Nothing to wait for."""
