"""torch.distributed between the ranks of a world: a reference for `bench allreduce`.

Ranks that our launcher, horovodrun or mpirun started know no MASTER_ADDR: rank 0 opens a store on the network interface
of the job and tells the others its address through the world.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from hvd_transformer.comm.world import World, agree
from hvd_transformer.errors import UserError

_CONNECT = timedelta(seconds=60)
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include")


class TorchGroup:
    """The ranks of `world` as torch's default process group; `backend` is "gloo" or "nccl". Collective.

    Raises `UserError` on all ranks if they cannot connect.
    """

    def __init__(self, world: World, backend: str) -> None:
        interface = _interface(world)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        server = agree(world, lambda: _serve() if world.rank == 0 else None)
        place = [_address(interface, world.host), server.port] if server is not None else None
        address, port = world.broadcast_object(place)
        agree(world, lambda: _join(world, backend, server or _connect(address, port)))

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place."""
        dist.all_reduce(tensor)

    def close(self) -> None:
        """End the process group. Collective."""
        dist.destroy_process_group()


def _serve() -> Any:
    try:
        return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=_CONNECT)
    except RuntimeError as error:
        raise UserError(f"torch.distributed: no store can be opened: {_first_line(error)}") from None


def _connect(address: str, port: int) -> Any:
    try:
        return TCPStore(address, port, is_master=False, timeout=_CONNECT)
    except RuntimeError as error:
        raise UserError(f"torch.distributed: {address} port {port} cannot be reached: {_first_line(error)}") from None


def _join(world: World, backend: str, store: Any) -> None:
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_CONNECT)
    except RuntimeError as error:
        raise UserError(f"torch.distributed over {backend}: ranks cannot connect: {_first_line(error)}") from None


def _interface(world: World) -> str | None:
    """The network interface that Horovod uses; None: unknown, which leaves the choice to torch."""
    named = next((os.environ[name] for name in _INTERFACE_VARIABLES if os.environ.get(name)), None)
    if named is not None:
        return named.split(",")[0]
    return "lo" if len(set(world.hosts)) == 1 else None


def _address(interface: str | None, host: str) -> str:
    """The IPv4 address of this host there; the host's name if it has none."""
    import psutil  # Horovod needs it, too

    found = psutil.net_if_addrs().get(interface, []) if interface is not None else []
    return next((str(own.address) for own in found if own.family == socket.AF_INET), host)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
