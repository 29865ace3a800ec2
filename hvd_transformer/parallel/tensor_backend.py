"""Chooses the library over which tensor groups communicate (`communication.tensor_backend`), and connects them."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hvd_transformer.comm.world import AgreedError, World, agree
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.tensor_parallel import Communicator

log = logging.getLogger(__name__)


class StageCommunicators(NamedTuple):
    """The communicator of each pipeline stage's layers, and what ends them."""

    stages: Sequence[Communicator]
    close: Callable[[], object]


def connect_stages(config: Config, world: World, mesh: ParallelMesh) -> StageCommunicators:
    """Connect the tensor group of this rank. Collective. Raises `UserError` on all ranks if they cannot connect."""
    wanted = config.communication.tensor_backend
    sharded = config.parallel.optimizer_shard == "gradients" and mesh.dp > 1
    if wanted == "auto" and sharded and world.backend_for(mesh.device) == "mpi":
        # Hosts wait for the replicas' gradients in backward. Sums over NCCL hold up no host, so one would be far ahead,
        # and Horovod's thread, which waits for the GPU over MPI, would answer no other rank meanwhile.
        wanted = "horovod"
    if not _uses_torch(wanted, world, mesh.device):
        # Horovod brings the collectives of all ranks into one order by their names, so that stages can share a group.
        log.info("tensor groups: Horovod over %s", world.backend_for(mesh.device))
        return StageCommunicators([mesh.tp_group] * len(mesh.devices), lambda: None)
    from hvd_transformer.comm.torch_group import TorchWorld  # there are torches without torch.distributed

    backend = _torch_backend(mesh.device)
    try:
        connected = TorchWorld(world, mesh.tp_group, backend, mesh.devices)
    except AgreedError as error:
        told = f"{error}; communication.tensor_backend=horovod does without"
        raise AgreedError(told, error.rank) from None
    log.info("tensor groups: torch.distributed over %s", backend)
    return StageCommunicators(connected.communicators, connected.close)


def _uses_torch(wanted: str, world: World, device: torch.device) -> bool:
    """Whether tensor groups use torch.distributed. Collective. Raises `UserError` if it is `wanted` but missing."""
    if wanted == "horovod" or (wanted == "auto" and device.type == "cpu"):
        return False
    backend = _torch_backend(device)
    there = dist.is_available() and (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available())
    if wanted == "auto":
        return bool(world.all_reduce_(torch.tensor([int(there)]), "tensor.backend", "min").item())

    def check() -> None:
        if not there:
            raise UserError(
                f"communication.tensor_backend=torch: this torch has no torch.distributed over {backend}; "
                "it can be horovod or auto"
            )

    agree(world, check)
    return True


def _torch_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
