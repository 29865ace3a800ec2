"""Running elastic jobs that get more ranks: when slots are free, nobody waits for them, and it is worth a restart."""

import math
from collections.abc import Iterator, Sequence

from hvd_transformer.service.jobs import Allocation, Needs, Placement
from hvd_transformer.service.scheduling.backfill import Time, Timeline
from hvd_transformer.service.scheduling.placement import Cluster, FreeSpace, Part, shape_of
from hvd_transformer.service.scheduling.snapshot import Grow, Running

WORTH_SECONDS = 600.0  # of the job's rest; growing costs it a restart


def grow(running: Sequence[Running], timeline: Timeline, cluster: Cluster, everything: FreeSpace) -> Iterator[Grow]:
    """Give free slots to running jobs with fewer ranks than they want: highest priority first, then the oldest.

    Takes from the timeline what it gives.
    """
    for job in sorted(running, key=lambda job: (-job.priority, job.began, job.id)):
        missing = job.needs.num_ranks - sum(placement.ranks for placement in job.allocation)
        if missing <= 0:
            continue
        end: Time = (math.inf, job.began) if job.expected_end is None else (job.expected_end, 0.0)
        if end[0] - timeline.now < WORTH_SECONDS:
            continue
        held = {part.host for part in cluster.parts(job.allocation)}
        parts = _more(job.needs, missing, held, timeline.spare(end[0]), everything)
        if parts:
            timeline.start(parts, end)
            yield Grow(job.id, _merged(job.allocation, cluster.take(parts)))


def _more(needs: Needs, missing: int, held: set[int], spare: FreeSpace, everything: FreeSpace) -> list[Part]:
    """Whole tensor groups, first on the hosts that the job has."""
    shape = shape_of(needs, everything)
    left = min(missing, spare.room(shape))
    left -= left % needs.tensor
    parts = []
    for host in sorted(held):
        ranks = min(left, spare.room_on(host, shape))
        if ranks:
            parts.append(Part(host, ranks, ranks * shape.gpus))
            left -= ranks
    if left:
        elsewhere = spare.copy()
        for host in held:
            elsewhere.set(host, 0, 0)
        parts += elsewhere.place(shape, left)
    return parts


def _merged(allocation: Allocation, more: Allocation) -> Allocation:
    """Hosts that the job has come first, so its ranks there keep their order."""
    added = {placement.host: placement for placement in more}
    result = []
    for placement in allocation:
        extra = added.pop(placement.host, Placement(placement.host, 0))
        result.append(Placement(placement.host, placement.ranks + extra.ranks, placement.gpus + extra.gpus))
    return (*result, *added.values())
