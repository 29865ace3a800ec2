"""Ranks as threads of one process, with a stand-in for Horovod that really reduces, gathers and broadcasts.

It counts what each rank hands over and gets back. Sums are in rank order.
"""

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from hvd_transformer.comm.world import World

Result = TypeVar("Result")
WAIT_SECONDS = 60.0  # for a rank that never comes


class Meeting:
    """One collective: each rank leaves its part; the last one computes the results of all."""

    def __init__(self, size: int) -> None:
        self.parts: dict[int, Any] = {}
        self.results: list[Any] = []
        self.size, self.done = size, threading.Event()


class ThreadHorovod:
    """Horovod as rank `rank` sees it. `meetings` is shared by all ranks.

    `bytes`, `messages` and `received`, the bytes that other ranks sent in all-to-alls, are this rank's.
    """

    Sum, Min, Max = torch.add, torch.minimum, torch.maximum
    can_send = False  # from GPUs

    def __init__(self, rank: int, size: int, meetings: dict[Any, Meeting], lock: threading.Lock) -> None:
        self.rank, self.size = rank, size
        self.bytes = self.messages = self.received = 0
        self._meetings, self._lock = meetings, lock
        self._numbers: Counter[Any] = Counter()

    def allreduce_async_(self, tensor: Tensor, name: str, op: Any, process_set: Any = None) -> Any:
        def reduce(parts: list[Tensor]) -> list[Tensor]:
            return [_reduced(parts, op)] * len(parts)

        return self._meet(tensor, name, process_set, reduce, into=tensor)

    def reducescatter_async(self, tensor: Tensor, name: str, op: Any, process_set: Any = None) -> Any:
        return self._meet(tensor, name, process_set, lambda parts: list(_reduced(parts, op)))

    def allgather_async(self, tensor: Tensor, name: str, process_set: Any = None) -> Any:
        return self._meet(tensor, name, process_set, lambda parts: [torch.cat(parts)] * len(parts))

    def broadcast_async_(self, tensor: Tensor, root_rank: int, name: str, process_set: Any = None) -> Any:
        root = self._ranks(process_set).index(root_rank)
        return self._meet(tensor, name, process_set, lambda parts: [parts[root]] * len(parts), into=tensor)

    def alltoall_async(self, tensor: Tensor, splits: Tensor, name: str, process_set: Any = None) -> Any:
        def exchange(parts: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
            columns = zip(*parts, strict=True)
            return [(torch.cat(column), torch.tensor([part.size(0) for part in column])) for column in columns]

        self.bytes += tensor.nbytes + splits.nbytes
        return self._meet(tensor.clone().split(splits.tolist()), name, process_set, exchange)

    def nccl_built(self) -> int:
        return int(self.can_send)

    def mpi_enabled(self) -> bool:
        return False

    def poll(self, handle: Any) -> bool:
        return bool(handle[0].done.is_set())

    def synchronize(self, handle: Any) -> Any:
        meeting, place, into = handle
        assert meeting.done.wait(WAIT_SECONDS), f"rank {self.rank} waits in vain"
        result = meeting.results[place]
        if isinstance(result, Tensor):
            self.bytes += result.nbytes
        else:
            rows, numbers = result
            self.bytes += rows.nbytes + numbers.nbytes
            self.received += rows.nbytes
        return result if into is None else into.copy_(result)

    def _ranks(self, process_set: Any) -> Sequence[int]:
        return range(self.size) if process_set is None else process_set.ranks

    def _meet(self, part: Any, name: str, process_set: Any, compute: Any, into: Tensor | None = None) -> Any:
        ranks = tuple(self._ranks(process_set))
        key = (ranks, name, self._numbers[ranks, name])
        self._numbers[ranks, name] += 1
        self.messages += 1
        if isinstance(part, Tensor):
            assert part.is_contiguous()
            self.bytes += part.nbytes
            part = part.clone()
        place = ranks.index(self.rank)
        with self._lock:
            meeting = self._meetings.setdefault(key, Meeting(len(ranks)))
            meeting.parts[place] = part
            last = len(meeting.parts) == meeting.size
        if last:
            meeting.results = compute([meeting.parts[number] for number in range(meeting.size)])
            meeting.done.set()
        return meeting, place, into


class _ProcessSets(dict[tuple[int, ...], Any]):
    def __missing__(self, ranks: tuple[int, ...]) -> Any:
        return SimpleNamespace(ranks=ranks)


def make_worlds(size: int, hosts: Sequence[str] | None = None) -> list[World]:
    """The worlds of all ranks, which one thread each must use. `hosts` are the ranks' hosts."""
    meetings: dict[Any, Meeting] = {}
    lock, worlds = threading.Lock(), []
    for rank in range(size):
        world = World()
        world.rank, world.size, world.ranks = rank, size, list(range(size))
        world.hosts = list(hosts or [world.host] * size)
        world.host = world.hosts[rank]
        world._process_sets = _ProcessSets()
        world.link.horovod = ThreadHorovod(rank, size, meetings, lock)
        worlds.append(world)
    return worlds


def on_ranks(worlds: Sequence[World], action: Callable[[World], Result]) -> list[Result | BaseException]:
    """What `action` returns, or raises, on each rank."""
    results: dict[int, Any] = defaultdict(lambda: AssertionError("no result"))

    def run(world: World) -> None:
        try:
            results[world.rank] = action(world)
        except BaseException as error:
            results[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,), daemon=True) for world in worlds]
    # All that `Link.guard` needs of Horovod, which may not be installed.
    exceptions = SimpleNamespace(HorovodInternalError=ConnectionError)
    with patch.dict(sys.modules, {"horovod.common.exceptions": exceptions}):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    return [results[world.rank] for world in worlds]


def _reduced(parts: Sequence[Tensor], operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = operation(result, part)
    return result
