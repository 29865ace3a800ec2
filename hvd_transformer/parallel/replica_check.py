"""Keeps replicas equal: broadcasts the weights at the start, and names the ranks whose checksum differs later."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import NoReturn

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.gradients.buffers import GradBuffer, ParamSlot

# Each position of 64 bits has its own odd weight (modulo 2^64), so that swapped values are seen, too.
_CHUNK = 1 << 17
_SMALL = 1 << 16  # elements of a weight that is copied rather than summed alone
_MULTIPLIER = 6364136223846793005


class ReplicasDiffer(RuntimeError):
    """Raised if ranks that should hold equal weights do not."""


def broadcast_parameters(buffers: Sequence[GradBuffer], group: Group) -> None:
    """Copy the parameters of the group's first rank to all others."""
    for index, buffer in enumerate(buffers):
        group.broadcast_(buffer.parameters, f"parameters.{index}")


def checksum(tensors: Sequence[Tensor]) -> int:
    """A 64-bit sum over the tensors' bits and positions, computed where the tensors are, with one wait per device."""
    words = [part for tensor in tensors for part in _words(tensor)]
    devices = {each.device for each in words}
    weights = {device: torch.arange(1, _CHUNK + 1, device=device) * _MULTIPLIER | 1 for device in devices}
    parts = [(chunk * weights[each.device][: chunk.numel()]).sum() for each in words for chunk in each.split(_CHUNK)]
    numbers = {
        device: iter(torch.stack([part for part in parts if part.device == device]).tolist()) for device in weights
    }
    total = 0
    for part in parts:
        total = (total * 31 + next(numbers[part.device])) % 2**64
    return total


def check_replicas(
    buffers: Sequence[GradBuffer],
    world: World,
    when: str,
    tensor: int = 1,
    cut: Collection[str] = (),
    frozen: int = 0,
) -> int:
    """Return the checksum of the weights. Raises `ReplicasDiffer` with the ranks that differ from the others.

    Groups of `tensor` neighbouring ranks split the weights named in `cut`; all other weights are equal on all ranks.
    `frozen` is this rank's checksum of those that are in no buffer.
    """
    split = set(cut) if tensor > 1 else set()
    common = _by_name(buffers, split) if split else _runs(buffers, lambda slot: True)
    own = [(checksum(common) + frozen) % 2**64, checksum(_runs(buffers, lambda slot: slot.name in split))]
    if not _equal(own, world, tensor):
        _raise_strangers(own, world, when, tensor)
    return (own[0] * 31 + own[1]) % 2**64


def _runs(buffers: Sequence[GradBuffer], chosen: Callable[[ParamSlot], bool]) -> list[Tensor]:
    """The `chosen` weights, neighbours joined into one tensor: the padding between them is zero on every rank."""
    found = []
    for buffer in buffers:
        for is_chosen, slots in groupby(buffer.slots, chosen):
            if is_chosen:
                run = list(slots)
                found.append(buffer.parameters[run[0].start : run[-1].stop])
    return found


def _by_name(buffers: Sequence[GradBuffer], split: Collection[str]) -> list[Tensor]:
    """The weights that are not split, in the order of their names, small ones joined.

    The order of the buffers may differ per rank, because shards of different sizes (a vocabulary of 99 on two ranks)
    can fill them differently.
    """
    slots = ((slot, buffer) for buffer in buffers for slot in buffer.slots if slot.name not in split)
    large: list[Tensor] = []
    small = defaultdict[tuple[torch.dtype, torch.device], list[Tensor]](list)
    for slot, buffer in sorted(slots, key=lambda found: found[0].name):
        weight = buffer.parameters[slot.start : slot.stop]
        (large if weight.numel() > _SMALL else small[weight.dtype, weight.device]).append(weight)
    return [*large, *map(torch.cat, small.values())]


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of a tensor as 64-bit words, and its last 32 bits if they are left over."""
    bits = tensor.detach().contiguous().flatten().view(torch.int32)
    if bits.storage_offset() % 2:
        bits = bits.clone()
    even = bits.numel() // 2 * 2
    return bits[:even].view(torch.int64), bits[even:].long()


def _equal(own: Sequence[int], world: World, tensor: int) -> bool:
    """Whether the first sum is equal on all ranks, and the second one on the ranks with the same shard. Collective.

    The sums' maxima and the maxima of their complements travel: as many numbers for any number of ranks.
    """
    common, split = (torch.tensor([value, ~value]) for value in map(_signed, own))
    highest = torch.full((1 + tensor, 2), torch.iinfo(torch.int64).min)
    highest[0], highest[1 + world.rank % tensor] = common, split
    world.all_reduce_(highest, "checksums", "max")
    return bool((highest[:, 0] <= ~highest[:, 1]).all())  # the largest sum is no larger than the smallest


def _raise_strangers(own: Sequence[int], world: World, when: str, tensor: int) -> NoReturn:
    """Raise `ReplicasDiffer` with the ranks whose sums differ. Collective."""
    sums = world.all_gather_async(torch.tensor([[_signed(value) for value in own]]), "checksums.all")().tolist()
    groups = [{rank: common for rank, (common, _) in enumerate(sums)}]
    groups += [{rank: sums[rank][1] for rank in range(shard, world.size, tensor)} for shard in range(tensor)]
    strangers = [_strangers(group) for group in groups]
    found = sorted(set().union(*strangers))
    tie = any(len(some) == len(group) for some, group in zip(strangers, groups, strict=True))
    others = "each other" if tie else "those of the other ranks"
    raise ReplicasDiffer(f"{when}: the weights of rank {', '.join(map(str, found))} differ from {others}")


def _signed(value: int) -> int:
    """Shift an unsigned 64-bit number into the range of torch's int64."""
    return value - 2**63


def _strangers(sums: dict[int, int]) -> set[int]:
    """The ranks whose sum is not the majority's; all ranks if there is no majority."""
    usual, count = Counter(sums.values()).most_common(1)[0]
    if count < len(sums) and 2 * count <= len(sums):
        return set(sums)
    return {rank for rank, value in sums.items() if value != usual}
