"""Whose job is next: priority, then the owner who used least, then the time of submission.

Usage is counted in slot-seconds and decays with a half-life of 7 days, so every owner has the same share in the long
run, whoever comes late is served first for a while, and nobody pays forever.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from heapq import heapify, heappop, heapreplace
from itertools import groupby

from hvd_transformer.service.scheduling.snapshot import Waiting

HALF_LIFE = 7 * 86_400.0
AHEAD_SECONDS = 1_800.0


def decayed(usage: float, seconds: float) -> float:
    """What is left of this usage after so many seconds."""
    return usage * math.pow(0.5, max(0.0, seconds) / HALF_LIFE)


class FairShare:
    """The usage of owners while a pass gives out slots.

    Slots count from the moment they are given, as if they were used for the next half hour: otherwise an owner with
    1,000 jobs would get every free slot of a pass, and of the passes until the usage shows.
    """

    def __init__(self, usage: Mapping[str, float]) -> None:
        self._usage = defaultdict(float, usage)

    def charge(self, owner: str, slots: int, seconds: float | None = None) -> None:
        """Count slots that the owner has for the next seconds; None: unknown."""
        self._usage[owner] += slots * (AHEAD_SECONDS if seconds is None else max(0.0, min(seconds, AHEAD_SECONDS)))

    def order(
        self, waiting: Sequence[Waiting], promised: Iterable[int] = (), soon: Set[int] = frozenset()
    ) -> Iterator[Waiting]:
        """The jobs, first to last. What is charged meanwhile moves the other jobs of that owner back.

        Jobs that were promised a start stay ahead of all others of their priority, in this order. Otherwise owners
        whose usage is about the same would overtake each other's large jobs again and again. Those that are about to
        start are ahead of all others that were promised one: nothing is promised anew in the places that await them.
        """
        places = {job: place for place, job in enumerate(promised)}
        by_priority = sorted(waiting, key=lambda job: (-job.priority, job.submitted, job.id))
        about_to_start = [job for job in by_priority if job.id in soon] if soon else []
        about_to_start.sort(key=lambda job: places[job.id])
        for _, jobs in groupby(by_priority, key=lambda job: job.priority):
            first: list[Waiting] = []
            queues: dict[str, list[Waiting]] = {}
            for job in jobs:
                (first if job.id in places else queues.setdefault(job.owner, [])).append(job)
            if first:
                yield from about_to_start
                about_to_start = []
                yield from sorted((job for job in first if job.id not in soon), key=lambda job: places[job.id])
            yield from self._take_turns(queues)

    def _take_turns(self, queues: Mapping[str, list[Waiting]]) -> Iterator[Waiting]:
        heap = []
        for owner, queue in queues.items():
            queue.reverse()
            heap.append(self._entry(owner, queue[-1]))
        heapify(heap)
        while heap:
            used, *_, owner = heap[0]
            if used < self._usage[owner]:  # charged since
                heapreplace(heap, self._entry(owner, queues[owner][-1]))
                continue
            yield queues[owner].pop()
            if queues[owner]:
                heapreplace(heap, self._entry(owner, queues[owner][-1]))
            else:
                heappop(heap)

    def _entry(self, owner: str, job: Waiting) -> tuple[float, float, int, str]:
        return self._usage[owner], job.submitted, job.id, owner
