"""The mesh of ranks: which replica and tensor-parallel rank this one is, its process groups, and its devices.

parallel.tensor=2 on 6 ranks    tp_rank  0   1
                    dp_rank 0           [0] [1]     a row splits the matrices of one replica: the tensor group
                    dp_rank 1           [2] [3]
                    dp_rank 2           [4] [5]     a column holds the same weights: the data-parallel group
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.streams import leave_default_stream
from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.buffers import WHOLE, ZeroShard
from hvd_transformer.parallel.devices import choose_devices


@dataclass(frozen=True)
class ParallelMesh:
    """world = dp × tp ranks, each with one device per pipeline stage."""

    dp: int
    tp: int
    dp_rank: int  # this rank's replica, of dp
    tp_rank: int  # this rank's place in its tensor group, of tp
    devices: tuple[torch.device, ...]
    dp_group: Group
    tp_group: Group
    zero_shard: ZeroShard  # of each gradient buffer
    warning: str | None = None  # why the CPU computes although there are GPUs

    @classmethod
    def of(cls, config: Config, world: World, devices: Sequence[torch.device] | None = None) -> "ParallelMesh":
        """The mesh of this world. `devices`: those of this rank's stages; None: as `training.device` says.

        Collective. Raises `UserError` if the sizes do not fit the world or the GPUs.
        """
        tensor = config.parallel.tensor
        if world.size % tensor:
            fitting = ", ".join(str(size) for size in range(1, world.size + 1) if world.size % size == 0)
            raise UserError(
                f"parallel.tensor={tensor}: must divide the job's number of ranks, {world.size}: it can be {fitting}"
            )
        dp_rank, tp_rank = divmod(world.rank, tensor)
        dp, shards = world.size // tensor, config.parallel.optimizer_shard
        zero_shard = ZeroShard(dp_rank, dp, shards == "gradients") if dp > 1 and shards != "none" else WHOLE
        warning = None
        if devices is None:
            devices, warning = choose_devices(config.training.device, config.parallel.pipeline, world)
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])
        mesh = cls(
            dp=dp,
            tp=tensor,
            dp_rank=dp_rank,
            tp_rank=tp_rank,
            devices=tuple(devices),
            dp_group=world.group(_dp_groups(world.size, tensor)[tp_rank]),
            tp_group=world.group(_tp_groups(world.size, tensor)[dp_rank], prompt=True),
            zero_shard=zero_shard,
            warning=warning,
        )
        if world.size > 1 and mesh.device.type == "cuda":
            leave_default_stream(mesh.devices)
        if config.parallel.tensor_across_hosts == "never" and (warning := mesh.across_hosts(config, world)):
            raise UserError(f"parallel.tensor_across_hosts=never: {warning}")
        return mesh

    @property
    def device(self) -> torch.device:
        """The device of the first stage."""
        return self.devices[0]

    def across_hosts(self, config: Config, world: World) -> str | None:
        """A warning with the traffic if a tensor group spans hosts, otherwise None."""
        for group in _tp_groups(world.size, self.tp):
            hosts = list(dict.fromkeys(world.hosts[rank] for rank in group))
            if len(hosts) > 1:
                model, training = config.model, config.training
                known = training.batch_size != "auto"
                span = "accumulation step" if known else "sample"
                tokens = (training.batch_samples if known else 1) * config.data.sequence_length
                sent = 4 * model.num_layers * tokens * model.d_model * 4 / 2**20  # two sums forward, two backward
                return (
                    f"the ranks {', '.join(map(str, group))} of one tensor group are on hosts {', '.join(hosts)}: "
                    f"{sent:,.0f} MiB of activations per {span} go between them while the layers wait"
                )
        return None


def process_groups(size: int, tensor: int) -> list[Sequence[int]]:
    """The process groups beside the world, for every rank to create; none if `tensor` does not divide `size`."""
    if size % tensor:
        return []
    groups = [*_tp_groups(size, tensor), *_dp_groups(size, tensor)]
    return [group for group in groups if 1 < len(group) < size]


def _tp_groups(size: int, tensor: int) -> list[Sequence[int]]:
    """The tensor groups: neighbouring ranks, so that a group is on one host if its slots are a multiple of `tensor`."""
    return [range(first, first + tensor) for first in range(0, size, tensor)]


def _dp_groups(size: int, tensor: int) -> list[Sequence[int]]:
    """The data-parallel groups: the ranks that hold the same shards."""
    return [range(shard, size, tensor) for shard in range(tensor)]
