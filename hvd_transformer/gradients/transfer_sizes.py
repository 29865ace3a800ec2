"""How many bytes of gradients and parameters travel at once, by device and number of ranks.

              bucket                     in flight per stage
CPU           8 MiB                      16 MiB of gradients, 64 MiB of parameters
GPU           25 MiB                     64 MiB
many ranks    at least 256 KiB a rank    at least two buckets
"""

from typing import NamedTuple

# On CPUs measured (benchmarks/RESULTS.md); on GPUs that of PyTorch's DDP (Li et al. 2020, arXiv 2006.15704, 4.2).
_BUCKET = {"cpu": 8 << 20, "cuda": 25 << 20}
# Each rank sums or keeps this share of a bucket. With smaller ones latency counts for more than bandwidth; Megatron-LM
# lets buckets grow with the ranks, too.
LEAST_SHARE = 256 << 10
# What a link carries (12.5 GB/s between CPUs, 450 GB/s between GPUs) while Horovod negotiates the next message: more
# than 1 ms and 0.1 ms. Less would leave it idle.
_GRADIENTS = {"cpu": 16 << 20, "cuda": 64 << 20}
_PARAMETERS = 64 << 20
# Buckets per stage, at least, where their transfer overlaps with backward; fewer if they would become too small.
MIN_BUCKETS = 4
_BUCKETS_IN_FLIGHT = 2  # one travels while the next one fills or arrives


class TransferSizes(NamedTuple):
    """In bytes. With ZeRO a stage has at most so many bytes of `gradients` and `parameters` in flight."""

    bucket: int
    gradients: int
    parameters: int


def transfer_sizes(device: str, num_replicas: int, bucket_mb: float | None) -> TransferSizes:
    """For `num_replicas` that reduce their gradients together on devices of the type "cpu" or "cuda".

    `bucket_mb`: `communication.bucket_mb`; None: chosen here.
    """
    chosen = max(_BUCKET[device], num_replicas * LEAST_SHARE)
    bucket = chosen if bucket_mb is None else int(bucket_mb * 2**20)
    several = _BUCKETS_IN_FLIGHT * bucket
    return TransferSizes(bucket, max(_GRADIENTS[device], several), max(_PARAMETERS, several))


def stage_bucket(largest: int, stage_bytes: int, num_shards: int, *, overlaps: bool) -> int:
    """The bytes of a bucket of a pipeline stage that has so many bytes of gradients; at most `largest`.

    `num_shards`: of a bucket that ZeRO's ranks share. On one host whose cores all compute, overlap gains nothing and
    each message costs CPU time, so buckets have the largest size. Where transfers can overlap with backward, a stage
    has at least `MIN_BUCKETS`.
    """
    if not overlaps:
        return largest
    return min(largest, max(LEAST_SHARE * num_shards, stage_bytes // MIN_BUCKETS))
