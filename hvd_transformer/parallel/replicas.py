"""Do all replicas hold the same weights? Broadcast at the start, and a checksum that says which rank differs."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_transformer.comm.world import World
from hvd_transformer.parallel.flat import Bucket

# Each position has an odd weight of its own (modulo 2^64), so that swapped values are seen too.
_CHUNK = 1 << 20
_MULTIPLIER = 6364136223846793005


class ReplicasDiffer(RuntimeError):
    """The ranks that should hold equal weights do not."""


def broadcast_parameters(buckets: Sequence[Bucket], world: World) -> None:
    """Every rank takes rank 0's weights."""
    for index, bucket in enumerate(buckets):
        world.broadcast_(bucket.parameters, f"parameters.{index}")


def checksum(tensors: Sequence[Tensor]) -> int:
    """A 64-bit sum over the tensors' bits and their positions; runs where the tensors are."""
    total = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(torch.int32)
        weights = torch.arange(1, min(_CHUNK, words.numel()) + 1, device=words.device) * _MULTIPLIER | 1
        for chunk in words.split(_CHUNK):
            part = int((chunk.long() * weights[: chunk.numel()]).sum().item())
            total = (total * 31 + part) % 2**64
    return total


def check_replicas(buckets: Sequence[Bucket], world: World, when: str) -> int:
    """The weights' checksum; raises `ReplicasDiffer` naming the ranks that are not like the others."""
    own = checksum([bucket.parameters for bucket in buckets])
    sums = world.all_gather_objects(own)
    usual, count = Counter(sums).most_common(1)[0]
    if count < len(sums):
        strangers = [rank for rank, value in enumerate(sums) if value != usual]
        raise ReplicasDiffer(
            f"{when}: the weights of rank {', '.join(map(str, strangers))} differ from those of the other ranks"
        )
    return own
