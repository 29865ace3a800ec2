"""A CPU double of CUDA streams: finds what streams do to each other's memory without an order between them.

Work runs at once, on CPU tensors, and is right whatever the order. The checker writes down on which stream it would
have been queued, with a vector clock per stream (Lamport 1978; as in race detectors), and reports

    unordered   a stream uses memory that another one has written, or overwrites what it may still read
    context     a worker's thread leaves a stream for one of GPU 0, where its process then opens a context
    reused      memory was freed while another stream than its own may still use it, and its own stream has gone on:
                torch's allocator gives freed memory to the next kernel of the stream that it was allocated on, and
                waits only for those that `record_stream` names
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvd_transformer.checkpoint import capture
from hvd_transformer.comm import streams
from hvd_transformer.gradients import local_steps, sync

CPU = torch.device("cpu")


class Clock(dict["FakeStream", int]):
    """How much of each stream is known to be done."""

    def join(self, other: "Clock") -> None:
        for stream, done in other.items():
            self[stream] = max(self.get(stream, 0), done)

    def covers(self, stream: "FakeStream", number: int) -> bool:
        return self.get(stream, 0) >= number


class FakeEvent:
    def __init__(self, checker: "StreamChecker", **_: object) -> None:
        self._checker, self.clock = checker, Clock()

    def record(self, stream: "FakeStream") -> None:
        self.clock = Clock(stream.clock)

    def synchronize(self) -> None:
        self._checker.host.join(self.clock)


class FakeStream:
    def __init__(self, checker: "StreamChecker", device: torch.device = CPU, name: str = "") -> None:
        self._checker, self.device = checker, device
        self.name = name or f"stream {len(checker.names)}"
        checker.names.append(self.name)
        self.clock = Clock({self: 0})
        self.freed: list[_Memory] = []  # its own memory, not checked yet

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._checker)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.clock.join(event.clock)

    def wait_stream(self, other: "FakeStream") -> None:
        self.clock.join(other.clock)

    def synchronize(self) -> None:
        self._checker.host.join(self.clock)


class FakeRuntime:
    """Which memory of the host a GPU may write itself."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # bytes by address

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@dataclass
class _Memory:
    """A block: who uses it up to which place in their streams, and what the last use was."""

    owner: FakeStream | None  # None: the host's, or from before
    written: tuple[FakeStream, int] | None = None
    used: dict[FakeStream, int] = field(default_factory=dict)
    recorded: set[FakeStream] = field(default_factory=set)
    last: str = "nothing"


class _Thread(threading.local):
    streams: list[FakeStream] | None = None
    device: torch.device | None = None  # None: GPU 0, whichever the stage's is
    paused = False


class _Watching(TorchDispatchMode):
    """Tells the checker of what this thread does."""

    def __init__(self, checker: "StreamChecker") -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._checker.dispatch(func, args, kwargs or {})


class StreamChecker:
    """Sees what is done within `watching`, and by other threads within `torch.cuda.stream`."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.names: list[str] = []
        self.host = Clock()  # what some thread of the host has waited for
        self.default = FakeStream(self, name="default")
        self.runtime = FakeRuntime()
        self.lock = threading.RLock()
        self._memory: dict[int, _Memory] = {}
        self._thread = _Thread()

    @property
    def stack(self) -> list[FakeStream]:
        if self._thread.streams is None:
            self._thread.streams = [self.default]
        return self._thread.streams

    def watching(self) -> _Watching:
        return _Watching(self)

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        if self._thread.paused:
            return found
        returns = func._schema.returns
        views = returns and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if views or func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.lift_fresh):
            return found
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = {each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write}
        reads = _tensors(value for name, value in given.items() if name not in written)
        writes = _tensors(value for name, value in given.items() if name in written)
        own = {_key(tensor) for tensor in (*reads, *writes)}
        makes = [tensor for tensor in _tensors([found]) if _key(tensor) not in own]
        name = str(func).removeprefix("aten.")
        with self.lock:
            stack = self.stack
            source, stream = stack[-2] if len(stack) > 1 else stack[-1], stack[-1]
            if name.startswith("_to_copy") and source.device != stream.device:  # a copy between devices
                source.wait_stream(stream)
                self.use(source, name, reads)
                stream.wait_stream(source)
                self.use(stream, name, (), makes=makes)
            else:
                self.use(stream, name, reads, writes, makes)
            if func.overloadpacket is torch.ops.aten._local_scalar_dense:
                stream.synchronize()
        return found

    def use(
        self,
        stream: FakeStream,
        what: str,
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
        makes: Iterable[Tensor] = (),
    ) -> None:
        """Queue work on a stream; `makes`: memory that is allocated for it there."""
        with self.lock:
            stream.clock.join(self.host)
            for memory in stream.freed:
                for other, number in memory.used.items():
                    if other not in memory.recorded and not stream.clock.covers(other, number):
                        self._report("reused", f"{memory.last} on {other.name}", f"{what} on {stream.name}")
            stream.freed.clear()
            stream.clock[stream] += 1
            now, where = stream.clock[stream], f"{what} on {stream.name}"
            for tensor in reads:
                memory = self._of(tensor)
                self._check(stream, [memory.written] if memory.written else [], memory, where)
                memory.used[stream], memory.last = now, what
            for tensor in makes:
                self._memory.pop(_key(tensor), None)
                self._of(tensor, stream)
            for tensor in (*writes, *makes):
                memory = self._of(tensor)
                self._check(stream, [*memory.used.items()], memory, where)
                memory.used, memory.written, memory.last = {stream: now}, (stream, now), what

    def _check(self, stream: FakeStream, uses: Sequence[tuple[FakeStream, int]], memory: _Memory, where: str) -> None:
        for other, number in uses:
            if not stream.clock.covers(other, number):
                self._report("unordered", f"{memory.last} on {other.name}", where)

    def _report(self, kind: str, before: str, after: str) -> None:
        self.problems.append(f"{kind}: {before}, then {after}")

    def _of(self, tensor: Tensor, owner: FakeStream | None = None) -> _Memory:
        key = _key(tensor)
        if key not in self._memory:
            self._memory[key] = memory = _Memory(owner)
            weakref.finalize(tensor.untyped_storage(), self._free, key, memory)
        return self._memory[key]

    def _free(self, key: int, memory: _Memory) -> None:
        with self.lock:
            if self._memory.get(key) is memory:
                del self._memory[key]
            if memory.owner is not None:
                memory.owner.freed.append(memory)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is computed inside is on no stream."""
        self._thread.paused = True
        try:
            yield
        finally:
            self._thread.paused = False

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        others = self._thread.streams is None
        self.stack.append(stream)
        try:
            if others and threading.current_thread() is not threading.main_thread():
                if self._thread.device != stream.device:
                    self._report("context", "nothing", f"the end of {stream.name}, which goes back to GPU 0")
                with self.watching():
                    yield
            else:
                yield
        finally:
            self.stack.pop()
            if others:
                self._thread.streams = None

    def set_device(self, device: torch.device) -> None:
        self._thread.device = device

    def set_stream(self, stream: FakeStream) -> None:
        self.stack[-1] = stream

    def host_may_read(self, tensor: Tensor) -> bool:
        """Whether the host has waited for what was queued to write it."""
        with self.lock:
            written = self._of(tensor).written
            return written is None or self.host.covers(*written)

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        with self.lock:
            self._of(tensor).recorded.add(stream)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of torch's streams; CPU tensors count as a GPU's."""
        assert self.stack == [self.default]
        tolist = Tensor.tolist

        def to_list(tensor: Tensor) -> Any:
            if not self.host_may_read(tensor):
                self.stack[-1].synchronize()
            return tolist(tensor)

        for module in (capture, streams, sync, local_steps):
            monkeypatch.setattr(module, "has_streams", lambda device: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self.runtime)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=CPU: FakeStream(self, device))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stack[-1])
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: self.default)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream))
        monkeypatch.setattr(Tensor, "tolist", to_list)


class StreamedHorovod:
    """Horovod as rank 0 of `size`, whose other ranks hold the same; its own stream does the work.

    As in its source (horovod/torch/mpi_ops_v2.cc, common/ops/gpu_operations.cc): the work waits for an event on the
    caller's current stream; the results of allgather and all-to-all are allocated by a thread whose current stream is
    the default one. `ends_on_stream`: HOROVOD_ENABLE_ASYNC_COMPLETION, with which that stream waits for the end and
    `synchronize` does not; otherwise the host waits.
    """

    Sum, Min, Max = "sum", "min", "max"

    def __init__(self, checker: StreamChecker, size: int, *, ends_on_stream: bool) -> None:
        self.checker, self.size, self.ends_on_stream = checker, size, ends_on_stream
        self.stream = FakeStream(checker, name="Horovod")
        self._handles: dict[int, Any] = {}  # they keep their tensors until `synchronize`
        self._number = 0

    def allreduce_async_(self, tensor: Tensor, name: str, op: str, process_set: Any = None) -> Any:
        factor = self.size if op == "sum" else 1
        return self._start(f"allreduce {name}", tensor, lambda: tensor.mul_(factor))

    def reducescatter_async(self, tensor: Tensor, name: str, op: str, process_set: Any = None) -> Any:
        current = self.checker.stack[-1]
        return self._start(f"reducescatter {name}", tensor, lambda: tensor[:1] * self.size, current)

    def allgather_async(self, tensor: Tensor, name: str, process_set: Any = None) -> Any:
        return self._start(f"allgather {name}", tensor, lambda: torch.cat([tensor] * self.size), self.checker.default)

    def broadcast_async_(self, tensor: Tensor, name: str, root_rank: int, process_set: Any = None) -> Any:
        return self._start(f"broadcast {name}", tensor, lambda: tensor)

    def alltoall_async(self, tensor: Tensor, splits: Tensor, name: str, process_set: Any = None) -> Any:
        own = int(splits[0])
        numbers = torch.full((self.size,), own)
        default = self.checker.default
        return self._start(f"alltoall {name}", tensor, lambda: torch.cat([tensor[:own]] * self.size), default, numbers)

    def poll(self, handle: int) -> bool:
        return True

    def synchronize(self, handle: int) -> Any:
        _, result, done, numbers = self._handles.pop(handle)
        if not self.ends_on_stream:
            done.synchronize()
        return result if numbers is None else (result, numbers)

    def _start(
        self,
        name: str,
        sent: Tensor,
        compute: Callable[[], Tensor],
        allocates: FakeStream | None = None,
        numbers: Tensor | None = None,
    ) -> int:
        checker, stream = self.checker, self.stream
        with checker.lock:
            with checker.paused():
                result = compute()
            stream.wait_stream(checker.stack[-1])
            if allocates is not None:
                checker.use(allocates, f"output of {name}", makes=[result])
                stream.wait_stream(allocates)
            checker.use(stream, name, [sent], [result])
            done = stream.record_event()
            if self.ends_on_stream:
                checker.default.wait_event(done)
            self._number += 1
            self._handles[self._number] = sent, result, done, numbers
            return self._number


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
