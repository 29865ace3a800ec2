"""Groups of ranks and their collectives over Horovod. A single rank needs no Horovod."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from hvd_transformer.comm.shared_buffers import SharedBuffers
from hvd_transformer.comm.streams import adopt

# Interval at which a pending collective is polled; `prompt` groups use the second one.
POLL_SECONDS = 0.0005
PROMPT_POLL_SECONDS = 0.00005
# Bytes of one message at most, of objects and of matrices: Horovod and MPI count in 32 bits.
MAX_MESSAGE = 2**30
ROUNDS = "rounds"  # the collective of `comm.rounds`, which tells of progress and is none
Operation = Literal["sum", "min", "max"]


class PeerLost(RuntimeError):
    """A collective failed because another rank is lost."""


class Link:
    """This process's connection to Horovod, shared by all of its groups.

    `sums_whole`: an allreduce is cheaper than a reduce-scatter. `waits_asleep`: Horovod's own wait sleeps; published
    Horovod spins. `gloo`: gloo runs the collectives. `shared_buffers`: memory that ranks share, if all are on one host.
    `ended` counts the collectives that this rank has waited for, and other signs of progress; `stream_waits` tell which
    ones its GPUs wait for. Other threads may read it and `waiting`.
    """

    def __init__(self, horovod: ModuleType | None, who: str) -> None:
        self.horovod, self.who = horovod, who
        self.sums_whole = self.waits_asleep = self.gloo = False
        self.shared_buffers: SharedBuffers | None = None
        self._waiting: dict[str, int] = {}
        self.stream_waits: list[Callable[[], dict[str, int]]] = []
        self.ended = 0

    @property
    def waiting(self) -> dict[str, int]:
        """The names of the collectives that this rank is waiting for, each with the thread that waits.

        Those of a GPU come first: what the host waits for may wait for them.
        """
        return {name: thread for waits in self.stream_waits for name, thread in waits().items()} | self._waiting

    @contextmanager
    def waits_for(self, name: str) -> Iterator[None]:
        """Inside, the host waits for a collective. After an error its name stays, for the watchdog's report."""
        if name == ROUNDS:
            yield
            return
        self._waiting[name] = threading.get_ident()
        yield
        del self._waiting[name]
        self.ended += 1

    def wait(self, handle: Any, name: str, poll_seconds: float) -> Any:
        """Wait for an asynchronous collective and return its result.

        It sleeps while waiting: spinning would take the core from other ranks and from this rank's own transfers. On a
        GPU a collective is done when it is queued there (`comm.streams`): this waits for the other ranks' hosts only.
        """
        hvd = self.horovod
        assert hvd is not None
        with self.waits_for(name):
            while not self.waits_asleep and not hvd.poll(handle):
                time.sleep(poll_seconds)
            return self.guard(lambda: hvd.synchronize(handle))

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

    has_bfloat16 = False

    def __init__(
        self, link: Link, ranks: Sequence[int], rank: int, process_set: Any = None, *, prompt: bool = False
    ) -> None:
        self._link, self.ranks = link, list(ranks)
        self._where = {} if process_set is None else {"process_set": process_set}
        self.rank, self.size = rank, len(self.ranks)
        self._poll_seconds = PROMPT_POLL_SECONDS if prompt else POLL_SECONDS

    def alone(self) -> "Group":
        """This rank as a group of its own, whose collectives send nothing."""
        return Group(self._link, [self.ranks[self.rank]], 0)

    @property
    def _horovod(self) -> ModuleType | None:
        return None if self.size == 1 else self._link.horovod

    @property
    def _shared_buffers(self) -> SharedBuffers | None:
        return None if self.size == 1 else self._link.shared_buffers

    @property
    def shares_memory(self) -> bool:
        """Whether tensors of `zeros_like` on a CPU are summed without copies, if the system has memory for that."""
        return self._shared_buffers is not None

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Contiguous zeros; if the group `shares_memory`, in memory that `all_reduce_async_` need not copy."""
        buffers = self._shared_buffers if tensor.device.type == "cpu" else None
        return torch.zeros_like(tensor) if buffers is None else buffers.zeros_like(tensor)

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
        whole = self._link.sums_whole or (self._link.gloo and self.size.bit_count() > 1)
        if whole and tensor.device.type == "cpu":  # GPUs have NCCL's
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

    def all_to_all_async(
        self, tensor: Tensor, name: str, splits: Sequence[int] | None = None
    ) -> Callable[[], tuple[Tensor, Sequence[int]]]:
        """Send `splits[rank]` rows of a contiguous tensor to each rank; None: equal parts.

        The function returned waits for the rows that the ranks sent here, in rank order, and their numbers by rank.
        """
        hvd = self._horovod
        if hvd is None:
            return lambda: (tensor, [tensor.size(0)])
        splits = splits or [tensor.size(0) // self.size] * self.size
        wait = self._start(hvd.alltoall_async, tensor, name, splits=torch.tensor(splits, dtype=torch.int32))

        def received() -> tuple[Tensor, Sequence[int]]:
            rows, numbers = wait()
            return rows, numbers.tolist()

        return received

    def send(self, tensor: Tensor, source: int, target: int, name: str) -> Tensor:
        """Send a contiguous 1-D tensor of rank `source` to rank `target`, which returns it; others get an empty one.

        Horovod has no point-to-point messages, so all ranks call this, with a tensor of the same dtype; only `source`
        sends its contents.
        """
        counts = [0] * self.size
        if self.rank == source:
            counts[target] = tensor.numel()
        return self.all_to_all_async(tensor if self.rank == source else tensor[:0], name, counts)()[0]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The value of rank `root`, which travels as JSON: nothing is unpickled. The others' values do not matter."""
        if self._horovod is None:
            return value
        data = _to_bytes(value) if self.rank == root else torch.empty(0, dtype=torch.uint8)
        size = int(self.broadcast_(torch.tensor([data.numel()]), "object.size", root))
        if self.rank != root:
            data = torch.empty(size, dtype=torch.uint8)
        for part in data.split(MAX_MESSAGE):
            self.broadcast_(part, "object.bytes", root)
        return json.loads(data.numpy().tobytes())

    def first_object(self, value: Any) -> tuple[int, Any] | None:
        """The first rank whose value is not None, and that value; None if there is no such rank.

        Costs one number where there is none, whatever the number of ranks.
        """
        own = self.size if value is None else self.rank
        first = int(self.all_reduce_(torch.tensor([own]), "object.first", "min"))
        return None if first == self.size else (first, self.broadcast_object(value, first))

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on rank 0; an empty list on the others. They travel as JSON.

        Each rank sends its own value only, and Horovod tells each rank the sizes that the others send it: 4 bytes per
        rank. Raises `ValueError` on all ranks if the values together have more than `MAX_MESSAGE` bytes.
        """
        if self._horovod is None:
            return [value]
        data = _to_bytes(value)
        total = int(self.all_reduce_(torch.tensor([data.numel()]), "objects.size"))
        if total > MAX_MESSAGE:
            raise ValueError(f"the objects of {self.size} ranks have {total:,} bytes, more than {MAX_MESSAGE:,}")
        to_first = [data.numel()] + [0] * (self.size - 1)
        joined, sizes = self.all_to_all_async(data, "objects.bytes", to_first)()
        return [json.loads(part.numpy().tobytes()) for part in joined.split(sizes)] if self.rank == 0 else []

    def all_gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on all of them: their bytes grow with the number of ranks."""
        if self._horovod is None:
            return [value]
        data = _to_bytes(value)
        sizes = self.all_gather_async(torch.tensor([data.numel()]), "objects.sizes")().tolist()
        joined = self.all_gather_async(data, "objects.bytes")()
        return [json.loads(part.numpy().tobytes()) for part in joined.split(sizes)]

    def barrier(self) -> None:
        """Wait until every rank of the group has called it."""
        self.all_reduce_(torch.zeros(1), "barrier")

    def _start(self, collective: Callable[..., Any], tensor: Tensor, name: str, **options: Any) -> Callable[[], Any]:
        """Start a collective of Horovod's; the function returned waits for its result."""
        link, poll_seconds = self._link, self._poll_seconds
        handle = link.guard(lambda: collective(tensor, name=name, **options, **self._where))

        def wait() -> Any:
            result = link.wait(handle, name, poll_seconds)
            for tensor in result if isinstance(result, tuple) else (result,):
                adopt(tensor)
            return result

        return wait


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
