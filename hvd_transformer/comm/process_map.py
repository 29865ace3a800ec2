"""An ordered map over several processes: over the other MPI ranks under mpirun, otherwise over local processes.

Both consume items only as earlier ones finish, so that a long input is never held in memory as a whole.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from hvd_transformer.comm.horovod_env import usable_cores

A = TypeVar("A")
B = TypeVar("B")

# This few items (a few tenths of a second each) are done sooner than processes start.
FEW_ITEMS = 8


class OrderedMap(Protocol):
    """Like the builtin `map`: yields results lazily, in the order of the items."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]: ...


@contextmanager
def worker_map(processes: int) -> Iterator[OrderedMap | None]:
    """A map over the MPI ranks if mpirun started several, otherwise `process_map(processes)`.

    Under MPI every rank must enter: rank 0 gets the map; the others work until rank 0 leaves, then get None.
    """
    if mpi_size() == 1:
        with process_map(processes) as mapped:
            yield mapped
        return
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    if MPI.COMM_WORLD.Get_rank():
        _one_thread()
    executor: Any
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        yield None if executor is None else _ExecutorMap(executor, MPI.COMM_WORLD.Get_size() - 1)


@contextmanager
def process_map(processes: int) -> Iterator[OrderedMap]:
    """A map over this many local processes (0: one per core), started when there are more than a few items.

    With one process it is the builtin `map`.
    """
    processes = processes or usable_cores()
    if processes == 1:
        yield map
        return
    with ExitStack() as stack:
        yield _LazyMap(processes, stack)


def mpi_size() -> int:
    """Number of ranks that mpirun started; 1 without it."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
    return next((int(os.environ[name]) for name in names if name in os.environ), 1)


class _ExecutorMap:
    """Keeps two items per worker in flight. They are not cancelled when the map is abandoned: before Python 3.11.4 the
    executor's shutdown would then hang (github.com/python/cpython/issues/94440)."""

    def __init__(self, executor: Executor, workers: int) -> None:
        self.executor = executor
        self.in_flight = 2 * workers

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
        waiting: deque[Future[B]] = deque()
        for item in items:
            waiting.append(self.executor.submit(function, item))
            if len(waiting) >= self.in_flight:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _LazyMap:
    """Starts its processes at the first long input and reuses them."""

    def __init__(self, processes: int, stack: ExitStack) -> None:
        self.processes = processes
        self.stack = stack
        self.mapped: _ExecutorMap | None = None
        self.threads: _ExecutorMap | None = None

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
        rest = iter(items)
        first = list(islice(rest, FEW_ITEMS + 1))
        if len(first) <= FEW_ITEMS:
            return map(function, first)
        if self.mapped is None:
            executor = ProcessPoolExecutor(
                self.processes,
                mp_context=multiprocessing.get_context("spawn"),  # threads, locks and MPI do not survive a fork
                initializer=_start_worker,
            )
            self.stack.enter_context(executor)
            self.mapped = _ExecutorMap(executor, self.processes)
        return self.mapped(function, chain(first, rest))

    def in_threads(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
        """Map over as many threads instead, for functions that release Python's lock."""
        if self.threads is None:
            executor = self.stack.enter_context(ThreadPoolExecutor(self.processes))
            self.stack.callback(executor.shutdown, wait=False, cancel_futures=True)  # a stop waits for none of the rest
            self.threads = _ExecutorMap(executor, self.processes)
        return self.threads(function, items)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and make the worker exit if its parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


def _one_thread() -> None:
    """Limit the libraries of a worker to one thread: the workers themselves use all cores."""
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, "1")
