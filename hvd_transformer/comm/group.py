"""Ranks that work together, and their collectives over Horovod; alone, a rank needs none of it."""

import json
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, cast

import torch
from torch import Tensor

# Between two looks at a collective that has not ended.
POLL_SECONDS = 0.0005
PROMPT_POLL_SECONDS = 0.00005
Operation = Literal["sum", "min", "max"]


class PeerLost(RuntimeError):
    """A collective could not end because another rank has gone."""


class Link:
    """This process's Horovod, which all of its groups share.

    `sums_whole`: where a rank needs a part of a sum, all of it is the cheaper one. `waits_asleep`: Horovod's own wait
    leaves the core to others; published Horovod's spins. `gloo`: collectives are gloo's. `waiting` holds the names of
    the collectives that this rank waits for at this moment, `ended` counts those that it has waited for: another
    thread may read both.
    """

    def __init__(self, horovod: ModuleType | None, who: str) -> None:
        self.horovod, self.who = horovod, who
        self.sums_whole = self.waits_asleep = self.gloo = False
        self.waiting: dict[str, None] = {}
        self.ended = 0

    def wait(self, handle: Any, name: str, poll_seconds: float) -> Any:
        """The result of an asynchronous collective, waited for asleep: a rank that spins takes its core from the others
        and from its own transfer."""
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
        """The action's result; raises `PeerLost` where Horovod has lost a rank."""
        assert self.horovod is not None
        from horovod.common.exceptions import HorovodInternalError

        try:
            return action()
        except HorovodInternalError as error:
            raise PeerLost(f"{self.who} lost another rank: {error}") from None


class Group:
    """Some ranks of the job, as one of them sees it: `rank` and `size` are those within the group.

    Every collective must be called by all of them; the asynchronous ones with the same names. `prompt`: others compute
    on with each result at once, so waiting for it may cost more of a core.
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
        """Reduces a contiguous tensor over the ranks, in place; returns the function that waits for the end."""
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
        """Sums a contiguous 1-D tensor over the ranks; each gets one of as many equal parts, in rank order.

        Returns the function that waits for this rank's. The tensor may be overwritten.
        """
        hvd = self._horovod
        if hvd is None:
            return lambda: tensor
        # Where the ranks are no power of two, gloo's own can return memory that another rank has freed already.
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
        """Joins the ranks' contiguous tensors along their first dimension, whose size may differ between ranks.

        Returns the function that waits for the result: all ranks' parts, in rank order.
        """
        hvd = self._horovod
        if hvd is None:
            return lambda: tensor
        handle = self._link.guard(lambda: hvd.allgather_async(tensor, name=name, **self._where))
        return lambda: cast(Tensor, self._wait(handle, name))

    def broadcast_(self, tensor: Tensor, name: str, root: int = 0) -> Tensor:
        """Overwrites a contiguous tensor with the root's, a rank of this group."""
        hvd = self._horovod
        if hvd is not None:
            first = self.ranks[root]  # also within a process set Horovod counts the world's ranks
            handle = self._link.guard(lambda: hvd.broadcast_async_(tensor, root_rank=first, name=name, **self._where))
            self._wait(handle, name)
        return tensor

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, in rank order. Travels as JSON: nothing is unpickled."""
        if self._horovod is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        sizes = self.all_gather_async(size, "objects.sizes")().tolist()
        joined = self.all_gather_async(data, "objects.bytes")()
        return [json.loads(part.numpy().tobytes()) for part in joined.split(sizes)]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's JSON-able value."""
        return self.all_gather_objects(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.all_reduce_(torch.zeros(1), "barrier")

    def _wait(self, handle: Any, name: str) -> Any:
        return self._link.wait(handle, name, self._poll_seconds)


def _done() -> None:
    """Nothing to wait for."""
