"""Keeps replicas equal: broadcasts the weights at the start, and names the ranks whose checksum differs later."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.gradients.buffers import GradBuffer

# Each position has its own odd weight (modulo 2^64), so that swapped values are seen, too.
_CHUNK = 1 << 18
_MULTIPLIER = 6364136223846793005


class ReplicasDiffer(RuntimeError):
    """The ranks that should hold equal weights do not."""


def broadcast_parameters(buffers: Sequence[GradBuffer], group: Group) -> None:
    """Copy the parameters of the group's first rank to all others."""
    for index, buffer in enumerate(buffers):
        group.broadcast_(buffer.parameters, f"parameters.{index}")


def checksum(tensors: Sequence[Tensor]) -> int:
    """A 64-bit sum over the tensors' bits and positions, computed where the tensors are, with one wait per device."""
    words = [tensor.detach().contiguous().flatten().view(torch.int32) for tensor in tensors]
    devices = {each.device for each in words}
    weights = {device: torch.arange(1, _CHUNK + 1, device=device) * _MULTIPLIER | 1 for device in devices}
    parts = [
        (chunk.long() * weights[each.device][: chunk.numel()]).sum() for each in words for chunk in each.split(_CHUNK)
    ]
    numbers = {
        device: iter(torch.stack([part for part in parts if part.device == device]).tolist()) for device in weights
    }
    total = 0
    for part in parts:
        total = (total * 31 + next(numbers[part.device])) % 2**64
    return total


def check_replicas(
    buffers: Sequence[GradBuffer], world: World, when: str, tensor: int = 1, cut: Collection[str] = ()
) -> int:
    """The checksum of the weights. Raises `ReplicasDiffer` with the ranks that differ from the others.

    Groups of `tensor` neighbouring ranks split the weights named in `cut`; all other weights are equal on all ranks.
    """
    split = set(cut) if tensor > 1 else set()
    # Neighbouring weights as one tensor: the padding between two is zero on every rank.
    runs: dict[bool, list[Tensor]] = {False: [], True: []}
    for buffer in buffers:
        for is_split, slots in groupby(buffer.slots, lambda slot: slot.name in split):
            run = list(slots)
            runs[is_split].append(buffer.parameters[run[0].start : run[-1].stop])
    own = [checksum(tensors) for tensors in runs.values()]
    sums = world.all_gather_objects(own)
    groups = [{rank: common for rank, (common, _) in enumerate(sums)}]
    groups += [{rank: sums[rank][1] for rank in range(shard, world.size, tensor)} for shard in range(tensor)]
    strangers = [_strangers(group) for group in groups]
    if found := sorted(set().union(*strangers)):
        tie = any(len(some) == len(group) for some, group in zip(strangers, groups, strict=True))
        others = "each other" if tie else "those of the other ranks"
        raise ReplicasDiffer(f"{when}: the weights of rank {', '.join(map(str, found))} differ from {others}")
    return (own[0] * 31 + own[1]) % 2**64


def _strangers(sums: dict[int, int]) -> set[int]:
    """The ranks whose sum is not the majority's; all ranks if there is no majority."""
    usual, count = Counter(sums.values()).most_common(1)[0]
    if count < len(sums) and 2 * count <= len(sums):
        return set(sums)
    return {rank for rank, value in sums.items() if value != usual}
