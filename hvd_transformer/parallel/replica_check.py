"""Do all replicas hold the same weights? Broadcast at the start, and a checksum that says which rank differs."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.gradients.buffers import GradBuffer

# Each position has an odd weight of its own (modulo 2^64), so that swapped values are seen too.
_CHUNK = 1 << 18
_MULTIPLIER = 6364136223846793005


class ReplicasDiffer(RuntimeError):
    """The ranks that should hold equal weights do not."""


def broadcast_parameters(buckets: Sequence[GradBuffer], group: Group) -> None:
    """Every rank takes those of the group's first."""
    for index, bucket in enumerate(buckets):
        group.broadcast_(bucket.parameters, f"parameters.{index}")


def checksum(tensors: Sequence[Tensor]) -> int:
    """A 64-bit sum over the tensors' bits and their positions; runs where the tensors are, and waits once for each
    device."""
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
    buckets: Sequence[GradBuffer], world: World, when: str, tensor: int = 1, cut: Collection[str] = ()
) -> int:
    """The weights' checksum; raises `ReplicasDiffer` naming the ranks that are not like the others.

    Each `tensor` neighbours share the weights named in `cut`, and have the others alike.
    """
    shared = set(cut) if tensor > 1 else set()
    runs = [run for bucket in buckets for run in _runs(bucket, shared)]
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


def _runs(bucket: GradBuffer, cut: Collection[str]) -> Iterator[tuple[Tensor, bool]]:
    """The bucket's weights, neighbours that are all cut, or all not, as one tensor: (values, whether they are cut).

    What lies between two weights is zero on every rank.
    """
    for is_cut, slots in groupby(bucket.slots, lambda slot: slot.name in cut):
        own = list(slots)
        yield bucket.parameters[own[0].start : own[-1].stop], is_cut


def _strangers(sums: dict[int, int]) -> set[int]:
    """The ranks whose sum is not the usual one; all of them where none is usual."""
    usual, count = Counter(sums.values()).most_common(1)[0]
    if count < len(sums) and 2 * count <= len(sums):
        return set(sums)
    return {rank for rank, value in sums.items() if value != usual}
