"""Keeps replicas equal: broadcasts the weights at the start, and names the ranks whose checksum differs later."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
    longest: dict[torch.device, int] = {}
    for each in words:
        longest[each.device] = max(longest.get(each.device, 0), min(_CHUNK, each.numel()))
    weights = {device: torch.arange(1, count + 1, device=device) * _MULTIPLIER | 1 for device, count in longest.items()}
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
    shared = set(cut) if tensor > 1 else set()
    runs = [run for buffer in buffers for run in _runs(buffer, shared)]
    own = [checksum([values for values, is_cut in runs if is_cut == part]) for part in (False, True)]
    sums = world.all_gather_objects(own)
    groups = [{rank: common for rank, (common, _) in enumerate(sums)}]
    groups += [{rank: sums[rank][1] for rank in range(shard, world.size, tensor)} for shard in range(tensor)]
    strangers = [_strangers(group) for group in groups]
    if found := sorted(set().union(*strangers)):
        tie = any(len(some) == len(group) for some, group in zip(strangers, groups, strict=True))
        others = "each other" if tie else "those of the other ranks"
        raise ReplicasDiffer(f"{when}: the weights of rank {', '.join(map(str, found))} differ from {others}")
    return (own[0] * 31 + own[1]) % 2**64


def _runs(buffer: GradBuffer, cut: Collection[str]) -> Iterator[tuple[Tensor, bool]]:
    """The buffer's weights, runs of split and of unsplit ones as one tensor each: (values, whether they are split).

    The padding between two weights is zero on every rank.
    """
    for is_cut, slots in groupby(buffer.slots, lambda slot: slot.name in cut):
        own = list(slots)
        yield buffer.parameters[own[0].start : own[-1].stop], is_cut


def _strangers(sums: dict[int, int]) -> set[int]:
    """The ranks whose sum is not the majority's; all ranks if there is no majority."""
    usual, count = Counter(sums.values()).most_common(1)[0]
    if count < len(sums) and 2 * count <= len(sums):
        return set(sums)
    return {rank for rank, value in sums.items() if value != usual}
