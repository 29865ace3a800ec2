"""The time of collectives over the ranks of one group, from the latency and bandwidth of its links.

    ring                 2 (P - 1) messages of n / P bytes: what gloo always uses, NCCL and MPI for large messages
    tree                 up and down a binary tree over the hosts, n bytes each way: NCCL, small messages, many hosts
    recursive doubling   log2 P messages of n bytes: MPI, small messages

NCCL: its tuning model, `ncclTopoTuneModel` of src/graph/tuning.cc (2.8): a base latency, and one for each step within a
host and between hosts; a tree moves half of a ring's bus bandwidth × 0.9; reduce-scatter and all-gather are rings.
gloo: as Horovod 0.28.1 calls it (horovod/common/ops/gloo_operations.cc): `gloo::allreduce` without naming an algorithm,
which is the ring of gloo/allreduce.cc at every size, a ring all-gather, and `ReduceScatterHalvingDoubling`.
MPI: Open MPI's "tuned" component has ring and recursive doubling for allreduce; here the faster one is taken.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from hvd_transformer.planning.constants import Backend, Constants, Link

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]
_TREE_BANDWIDTH = 0.9 / 2  # of a ring's bus bandwidth: each byte goes up the tree and down again
# NCCL's "plateau effect of ring": an allreduce of so many bytes per rank over several hosts has more latency.
_PLATEAU_BYTES, _PLATEAU = 4096, 1.9


class Group(NamedTuple):
    """Where the ranks of a group are: evenly over hosts, in the order of the ranks."""

    size: int
    hosts: int = 1  # on which they are
    sharing: int = 1  # such groups that use each host's network link at the same time


class Seconds(NamedTuple):
    """The time of one collective, and what it takes from computing on a CPU."""

    latency: float
    transfer: float
    cpu: float = 0.0

    @property
    def total(self) -> float:
        return self.latency + self.transfer

    def times(self, count: float) -> "Seconds":
        """Seconds of `count` such collectives, one after the other."""
        return Seconds(*(part * count for part in self))


NOTHING = Seconds(0.0, 0.0)


def added(parts: Iterable[Seconds]) -> Seconds:
    """The time of collectives one after the other."""
    return Seconds(*map(math.fsum, zip(NOTHING, *parts, strict=True)))


def collective_time(
    constants: Constants, backend: Backend, kind: Collective, group: Group, num_bytes: float
) -> Seconds:
    """The time of one collective of `num_bytes`: those of the whole tensor, also where each rank has a part of it.

    Raises `UserError` if the constants have no such link.
    """
    if group.size == 1 or num_bytes == 0:
        return NOTHING
    network = constants.link(backend, "network" if group.hosts > 1 else "host")
    host = constants.link(backend, "host") if group.hosts < group.size else network
    bandwidth = min(host.bandwidth, network.bandwidth / group.sharing)
    rounds = 2 if kind == "all_reduce" else 1
    steps = group.size - 1
    sent = rounds * steps / group.size * num_bytes  # by each rank
    if kind == "reduce_scatter" and backend == "gloo":
        steps = math.ceil(math.log2(group.size))
    between = min(steps, group.hosts - 1)
    latency = rounds * ((steps - between) * host.latency + between * network.latency)
    if backend == "nccl" and kind == "all_reduce" and group.hosts > 1 and num_bytes >= _PLATEAU_BYTES * group.size:
        latency *= _PLATEAU
    ring = Seconds(network.overhead + latency, sent / bandwidth, sent * network.cpu_seconds_per_byte)
    if kind != "all_reduce" or backend == "gloo":
        return ring
    small = _tree if backend == "nccl" else _recursive_doubling
    return min(ring, small(group, num_bytes, bandwidth, host, network), key=lambda seconds: seconds.total)


def _tree(group: Group, num_bytes: float, bandwidth: float, host: Link, network: Link) -> Seconds:
    within = math.ceil(group.size / group.hosts) - 1
    latency = 2 * (within * host.latency + math.log2(group.hosts) * network.latency)
    return Seconds(network.overhead + latency, num_bytes / (_TREE_BANDWIDTH * bandwidth))


def _recursive_doubling(group: Group, num_bytes: float, bandwidth: float, host: Link, network: Link) -> Seconds:
    between = math.ceil(math.log2(group.hosts))
    within = math.ceil(math.log2(group.size)) - between
    sent = (within + between) * num_bytes
    latency = within * host.latency + between * network.latency
    return Seconds(network.overhead + latency, sent / bandwidth, sent * network.cpu_seconds_per_byte)
