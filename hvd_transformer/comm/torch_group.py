"""torch.distributed between ranks: for the layers of a tensor group, and as a reference for `bench allreduce`.

Ranks that our launcher, horovodrun or mpirun started know no MASTER_ADDR: the first rank opens a store on the network
interface of the job and tells the others its address through Horovod.
"""

import ipaddress
import os
import re
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from hvd_transformer.comm.group import Group, Link, PeerLost
from hvd_transformer.comm.world import World, agree
from hvd_transformer.errors import UserError

_CONNECT = timedelta(seconds=60)
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include")
# How long a collective waits for ranks that do not answer: as long as Horovod's, and longer than the watchdog.
_TIMEOUT_VARIABLE, _TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS", "600"
# Of a communicator's collectives, those that a stream may not have finished: more than a GPU has in its queue.
_RECENT = 1024


class TorchWorld:
    """The ranks of one group as a world of torch.distributed, with a communicator for each of `devices`.

    A communicator does what its ranks start in the order in which they start it, which must be the same on all of them.
    The stages of a pipeline start theirs in threads of their own, in an order that differs between ranks, so each stage
    has its own communicator. Within a stage the schedule fixes the order. On GPUs a stage's sum then waits for the same
    sum of the other ranks and never for another stage's, whose kernels run in other streams.

    A process has one such world at a time. `close` ends it, and so do the next one and the end of the process and of
    the last reference.
    """

    _end_last: ClassVar[Callable[[], object]] = staticmethod(lambda: None)

    def __init__(self, world: World, group: Group, backend: str, devices: Sequence[torch.device]) -> None:
        """Collective over `world`, whose ranks have a `group` each; `backend` is "gloo" or "nccl".

        Raises `UserError` on all ranks if some cannot connect.
        """
        interface = _interface(world)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        # A lost rank ends the communicator, and the next collective raises; by default it ends the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        TorchWorld._end_last()  # a job that failed before may have left it
        address = _address(interface, world.host)
        server = agree(world, lambda: _serve(address, on_one=interface is not None) if group.rank == 0 else None)
        address, port = group.broadcast_object([address, server and server.port])
        agree(world, lambda: _join(group, backend, server or _connect(address, port)))
        self._end = TorchWorld._end_last = weakref.finalize(self, _end, world.link)
        # Connected here, one after the other: in the threads of the stages, two could wait for one another.
        self.communicators = [
            agree(world, lambda device=device: TorchGroup(world.link, group, device))  # type: ignore[misc]
            for device in devices
        ]

    def close(self) -> None:
        """End the communicators. Whoever keeps this method keeps them alive."""
        self._end()


class TorchGroup:
    """One communicator of a `TorchWorld`, with the collectives of `Group` that layers need.

    With NCCL the waits hold up the current stream and not the host.
    """

    has_bfloat16 = True

    def __init__(self, link: Link, group: Group, device: torch.device) -> None:
        self.rank, self.size = group.rank, group.size
        self._link, self._stream_waits = link, None
        timeout = timedelta(seconds=float(os.environ.get(_TIMEOUT_VARIABLE, _TIMEOUT)))
        try:
            self._group = dist.new_group(timeout=timeout)
            dist.all_reduce(probe := torch.ones(1, device=device), group=self._group)
            assert probe.item() == self.size  # a GPU waits for it
        except RuntimeError as error:
            raise UserError(f"torch.distributed: ranks cannot connect: {_first_sentence(error)}") from None
        if device.type == "cuda":
            mark = partial(_mark, device)
            self._stream_waits = StreamWaits(mark, partial(torch.cuda.device, device))
            link.stream_waits.append(self._stream_waits.now)

    def all_reduce_async_(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to sum a contiguous tensor over the ranks, in place; the function returned waits, and returns it."""
        return self._start(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), name, tensor)

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Concatenate the ranks' contiguous tensors of this shape along the first dimension, in rank order.

        The function returned waits for the result.
        """
        result = tensor.new_empty(self.size * tensor.size(0), *tensor.shape[1:])
        parts = list(result.chunk(self.size))
        return self._start(lambda: dist.all_gather(parts, tensor, group=self._group, async_op=True), name, result)

    def _start(self, collective: Callable[[], Any], name: str, result: Tensor) -> Callable[[], Tensor]:
        began = self._stream_waits and self._stream_waits.mark()
        try:
            work = collective()
        except dist.DistError as error:  # what a lost rank has left of an NCCL communicator
            raise self._lost(error) from None

        def wait() -> Tensor:
            with self._link.waits_for(name):
                try:
                    work.wait()
                except (torch.AcceleratorError, torch.OutOfMemoryError):
                    raise
                except RuntimeError as error:
                    raise self._lost(error) from None
            if self._stream_waits is not None:
                self._stream_waits.add(name, began)
            return result

        return wait

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"{self._link.who} lost another rank: {_first_sentence(error)}")


def _mark(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event()


class StreamWaits:
    """Which collective a GPU's stream is in, for the watchdog: the host only enqueues them. `mark` records an event;
    `device` makes the GPU the current one, where a thread that has none would open a context on GPU 0."""

    def __init__(
        self, mark: Callable[[], Any], device: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.mark, self._device = mark, device
        self._recent = deque[tuple[str, int, Any, Any]](maxlen=_RECENT)

    def add(self, name: str, began: Any) -> None:
        """The collective whose start is marked by `began`; the stream now waits for it."""
        self._recent.append((name, threading.get_ident(), began, self.mark()))

    def now(self) -> dict[str, int]:
        """The collective that has begun and not ended, with the thread that enqueued it. For any thread."""
        with suppress(RuntimeError), self._device():  # after some errors a GPU answers nothing more
            for name, thread, began, ended in reversed(self._recent.copy()):
                if ended.query():
                    break
                if began.query():
                    return {name: thread}
        return {}


def _serve(address: str, on_one: bool) -> Any:
    """A store that listens on one address, or on all."""
    try:
        listener = socket.create_server((address if on_one else "", 0), backlog=128)
    except OSError as error:
        raise UserError(f"torch.distributed: no store can be opened on {address}: {error.strerror}") from None
    port = listener.getsockname()[1]
    try:
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=_CONNECT, master_listen_fd=listener.detach()
        )
    except RuntimeError as error:
        raise UserError(f"torch.distributed: no store can be opened: {_first_sentence(error)}") from None


def _connect(address: str, port: int) -> Any:
    try:
        return TCPStore(address, port, is_master=False, timeout=_CONNECT)
    except RuntimeError as error:
        raise UserError(
            f"torch.distributed: {address} port {port} cannot be reached: {_first_sentence(error)}"
        ) from None


def _join(group: Group, backend: str, store: Any) -> None:
    try:
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=_CONNECT)
    except (RuntimeError, ValueError) as error:  # the latter where code of the user's has opened a world of its own
        raise UserError(f"torch.distributed over {backend}: ranks cannot connect: {_first_sentence(error)}") from None


def _end(link: Link) -> None:
    link.stream_waits.clear()
    dist.destroy_process_group()


def _interface(world: World) -> str | None:
    """The network interface that Horovod uses; None: unknown, which leaves the choice to torch."""
    named = next((os.environ[name] for name in _INTERFACE_VARIABLES if os.environ.get(name)), None)
    if named is not None:
        first = named.split(",")[0]
        return _interface_in(first) if "/" in first else first
    return "lo" if len(set(world.hosts)) == 1 else None


def _interface_in(subnet: str) -> str | None:
    """The network interface with an address in a subnet such as 10.1.0.0/16, as Open MPI takes them; None: there is
    none."""
    import psutil

    with suppress(ValueError):
        network = ipaddress.IPv4Network(subnet, strict=False)
        for name, addresses in psutil.net_if_addrs().items():
            if any(own.family == socket.AF_INET and ipaddress.IPv4Address(own.address) in network for own in addresses):
                return str(name)
    return None


def _address(interface: str | None, host: str) -> str:
    """The IPv4 address of this host there; the host's name if it has none."""
    import psutil  # Horovod needs it, too

    found = psutil.net_if_addrs().get(interface, []) if interface is not None else []
    return next((str(own.address) for own in found if own.family == socket.AF_INET), host)


def _first_sentence(error: Exception) -> str:
    """Without the place in torch's own source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
