"""Groups of ranks and their collectives over Horovod. A single rank needs no Horovod."""

import json
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

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
        """Wait for an asynchronous collective and return its result.

        It sleeps while waiting: spinning would take the core from other ranks and from this rank's own transfers.
        """
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
        """Return the result of `action`. Raises `PeerLost` if Horovod has lost a rank."""
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
        self._link, self.ranks = link, list(ranks)
        self._where = {} if process_set is None else {"process_set": process_set}
        self.rank, self.size = rank, len(self.ranks)
        self._poll_seconds = PROMPT_POLL_SECONDS if prompt else POLL_SECONDS

    @property
    def _horovod(self) -> ModuleType | None:
        return None if self.size == 1 else self._link.horovod

    def all_reduce_async_(self, tensor: Tensor, name: str, operation: Operation = "sum") -> Callable[[], Tensor]:
        """Start to reduce a contiguous tensor over the ranks, in place; the function returned waits, and returns it."""
        hvd = self._horovod
        if hvd is None:
            return lambda: tensor
        kinds = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        return self._start(hvd.allreduce_async_, tensor, name, op=kinds[operation])

    def all_reduce_(self, tensor: Tensor, name: str, operation: Operation = "sum") -> Tensor:
        """Reduce a contiguous tensor over the ranks, in place, and wait."""
        return self.all_reduce_async_(tensor, name, operation)()

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Sum a contiguous 1-D tensor over the ranks and scatter it in equal parts, in rank order.

        The function returned waits for this rank's part. The tensor may be overwritten.
        """
        hvd = self._horovod
        if hvd is None:
            return lambda: tensor
        # Unless the number of ranks is a power of two, gloo's can return memory that another rank has already freed.
        if self._link.sums_whole or (self._link.gloo and self.size.bit_count() > 1):
            wait = self.all_reduce_async_(tensor, name)
            return lambda: wait().view(self.size, -1)[self.rank]
        wait = self._start(hvd.reducescatter_async, tensor.view(self.size, -1), name, op=hvd.Sum)
        return lambda: wait().flatten()

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Concatenate the ranks' contiguous tensors along the first dimension, whose size may differ between ranks.

        The function returned waits for the result, in rank order.
        """
        hvd = self._horovod
        return (lambda: tensor) if hvd is None else self._start(hvd.allgather_async, tensor, name)

    def broadcast_(self, tensor: Tensor, name: str, root: int = 0) -> Tensor:
        """Overwrite a contiguous tensor with that of rank `root` of this group."""
        hvd = self._horovod
        if hvd is not None:
            # Horovod expects the root's rank in the world, even within a process set.
            self._start(hvd.broadcast_async_, tensor, name, root_rank=self.ranks[root])()
        return tensor

    def all_to_all(self, tensor: Tensor, counts: Sequence[int], name: str) -> Tensor:
        """Send `counts[rank]` elements of a contiguous 1-D tensor to each rank, in rank order.

        Returns what all ranks sent to this one, in rank order. Where a count is 0, nothing travels.
        """
        hvd = self._horovod
        if hvd is None:
            return tensor
        received: Tensor = self._start(
            hvd.alltoall_async, tensor, name, splits=torch.tensor(counts, dtype=torch.int32)
        )()[0]
        return received

    def send(self, tensor: Tensor, source: int, target: int, name: str) -> Tensor:
        """Send a contiguous 1-D tensor of rank `source` to rank `target`, which returns it; others get an empty one.

        Horovod has no point-to-point messages, so all ranks call this, with a tensor of the same dtype; only `source`
        sends its contents.
        """
        counts = [0] * self.size
        if self.rank == source:
            counts[target] = tensor.numel()
        return self.all_to_all(tensor if self.rank == source else tensor[:0], counts, name)

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
        """Wait until every rank of the group has called it."""
        self.all_reduce_(torch.zeros(1), "barrier")

    def _start(self, collective: Callable[..., Any], tensor: Tensor, name: str, **options: Any) -> Callable[[], Tensor]:
        """Start a collective of Horovod's; the function returned waits for its result."""
        link, poll_seconds = self._link, self._poll_seconds
        handle = link.guard(lambda: collective(tensor, name=name, **options, **self._where))
        return lambda: link.wait(handle, name, poll_seconds)
