"""Which jobs start, stop and grow now: a pure function from a snapshot to decisions.

One pass goes through the waiting jobs in order of priority, fair share and submission. A job that fits starts. The
first ones that do not fit get a reservation, by stopping jobs of lower priority where that makes room; the others start
only where they do not delay a reservation (backfill).

A job of unknown length counts as one of median length: if it takes longer, it delays some job a little. But where most
slots are reserved for one job, all of them would wait with it. Behind such a job it counts as endless.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

from hvd_transformer.service.jobs import Host, Needs
from hvd_transformer.service.scheduling import wait_reasons
from hvd_transformer.service.scheduling.backfill import Event, Time, Timeline
from hvd_transformer.service.scheduling.fair_share import FairShare
from hvd_transformer.service.scheduling.growth import grow
from hvd_transformer.service.scheduling.placement import (
    Cluster,
    FreeSpace,
    Part,
    Shape,
    all_free,
    best_size,
    least_ranks,
    shape_of,
)
from hvd_transformer.service.scheduling.preemption import Candidate, choose_victims, room_in
from hvd_transformer.service.scheduling.snapshot import (
    Decisions,
    Grow,
    Preempt,
    Promise,
    Running,
    Snapshot,
    Start,
    Waiting,
)

RESERVATIONS = 8
PUT_OFF_SECONDS = 6 * 3_600.0  # a job is put off no longer by others that take longer than was thought
LARGE = 0.5  # the part of all slots from which on a job is guarded against jobs of unknown length
STOP_SECONDS = 60.0  # until a job that is being stopped has saved and its slots are free


def schedule(snapshot: Snapshot) -> Decisions:
    """Decide what to start, stop and grow. The cost grows with waiting and running jobs, and with starts × hosts."""
    return _Pass(snapshot).decide()


def fits(hosts: Sequence[Host]) -> Callable[[Needs], bool]:
    """Tells whether a job could run if all of these hosts were free."""
    everything = all_free(hosts)
    return cache(lambda needs: everything.room(shape_of(needs, everything)) >= least_ranks(needs))


def can_ever_fit(needs: Needs, hosts: Sequence[Host]) -> str | None:
    """Why a job can never run on these hosts, even if all are up and free; None: it can."""
    everything = all_free(hosts)
    shape = shape_of(needs, everything)
    room = everything.room(shape)
    if room >= least_ranks(needs):
        return None
    has = f"all hosts together have {room}" if hosts else "the service has no hosts"
    return f"needs {wait_reasons.needed(needs, shape)}, {has}"


class _Pass:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot, self._now = snapshot, snapshot.now
        usable = [host for host in snapshot.hosts if not (host.down or host.drained)]
        used = [placement for job in snapshot.running for placement in job.allocation]
        self._cluster = Cluster(usable, [*used, *snapshot.taken])
        self._everything = all_free(snapshot.hosts)
        self._usable = all_free(usable)
        self._available = Cluster(usable, snapshot.taken).free  # once all jobs have ended
        self._soon: Time = (self._now + STOP_SECONDS, 0.0)
        self._ends = {
            job.id: Event(self._end_of(job), False, self._cluster.parts(job.allocation)) for job in snapshot.running
        }
        self._timeline = Timeline(self._now, self._cluster.free, self._ends.values())
        self._share = FairShare(snapshot.usage)
        for job in snapshot.running:
            slots = sum(placement.ranks for placement in job.allocation)
            self._share.charge(job.owner, slots, self._ends[job.id].time[0] - self._now)
        self._preemptible = {job.id: job for job in snapshot.running if not job.stopping}
        self._places = {job: promise.place for job, promise in snapshot.promised.items() if promise.place}
        self._shapes: dict[Needs, tuple[Shape, int]] = {}
        self._assumed = snapshot.median_seconds  # the length of jobs of unknown length
        self._reservations_left = RESERVATIONS
        self._queue = _Queue()
        self._starts: list[Start] = []
        self._preempts: list[Preempt] = []
        self._reasons: dict[int, str] = {}
        self._estimated: dict[int, float] = {}
        self._promised: dict[int, Promise] = {}

    def decide(self) -> Decisions:
        all_reserved = True
        for job in self._share.order(self._snapshot.waiting, self._snapshot.promised, self._places.keys()):
            shape, least = self._shape(job.needs)
            seconds = self._assumed if job.seconds is None else job.seconds
            end = math.inf if seconds is None else self._now + seconds
            spare = self._timeline.spare(end)
            parts = self._place(job, shape, spare)
            if parts:
                self._starts.append(Start(job.id, self._cluster.take(parts)))
                self._timeline.start(parts, (end, self._now if seconds is None else 0.0))
                self._share.charge(job.owner, sum(part.slots for part in parts), seconds)
            elif self._available.room(shape) < least:
                self._reasons[job.id] = self._unavailable(job.needs, shape, least)
            else:
                may_reserve = self._reservations_left > 0
                self._reasons[job.id] = self._blocked(job, shape, least, end, may_reserve)
                if may_reserve:
                    self._reserve(job, shape, least, seconds)
                else:
                    all_reserved = False
        grows: list[Grow] = []
        if all_reserved:
            grows += grow(list(self._preemptible.values()), self._timeline, self._cluster, self._everything)
        return Decisions(self._starts, self._preempts, grows, self._reasons, self._estimated, self._promised)

    def _place(self, job: Waiting, shape: Shape, spare: FreeSpace) -> list[Part]:
        """Where it starts, if there is room: in the place that it was promised, else with as many ranks as fit."""
        if job.id in self._places:
            promised = self._cluster.parts_of(self._places[job.id], shape)
            ranks = sum(slots for _, slots in self._places[job.id])
            # Its owner's limit may have left it fewer ranks since then.
            if promised is not None and ranks <= job.needs.num_ranks and spare.fits(promised):
                return promised
        ranks = best_size(job.needs, spare.room(shape))
        return spare.place(shape, ranks) if ranks else []

    def _shape(self, needs: Needs) -> tuple[Shape, int]:
        if needs not in self._shapes:
            self._shapes[needs] = shape_of(needs, self._everything), least_ranks(needs)
        return self._shapes[needs]

    def _end_of(self, job: Running) -> Time:
        if job.stopping:
            return self._soon
        if job.expected_end is None:
            return (math.inf, job.began)  # the oldest is likely to end first
        return (job.expected_end, 0.0) if job.expected_end > self._now else self._soon

    def _unavailable(self, needs: Needs, shape: Shape, least: int) -> str:
        if self._usable.room(shape) >= least:
            return wait_reasons.outside(needs, shape, self._available.room(shape))
        if self._everything.room(shape) >= least:
            return wait_reasons.unusable(self._snapshot.hosts)
        return f"resources: {can_ever_fit(needs, self._snapshot.hosts)}"

    def _blocked(self, job: Waiting, shape: Shape, least: int, end: float, reserves: bool) -> str:
        """Why it waits, although the hosts are there."""
        higher, other = self._queue.ahead_of(job)
        holder = self._timeline.held_by(shape, least, end)
        if holder is not None:
            return wait_reasons.reserved(holder)
        if not reserves and higher is not None:
            return wait_reasons.behind_priority(higher.id)
        if not reserves and other is not None:
            return wait_reasons.behind_owner(other.id, other.owner)
        return wait_reasons.resources(job.needs, shape, self._timeline.free.room(shape))

    def _reserve(self, job: Waiting, shape: Shape, least: int, seconds: float | None) -> None:
        """Promise the job the first place that it can have, after stopping others where that is sooner."""
        self._reservations_left -= 1
        ranks = self._preempt(job, shape, least) or least
        opening = self._timeline.opening(shape, ranks)
        promised, place = self._promise_so_far(job), Promise().place
        if opening is not None:
            spare, soon = opening.spare, opening.time <= self._soon
            parts = self._place(job, shape, spare) if soon else spare.place(shape, ranks)
            ranks = sum(part.slots for part in parts)
            start = self._timeline.reserve(job.id, opening, parts, seconds, promised + PUT_OFF_SECONDS)
            if start is not None:
                self._estimated[job.id] = start
                promised = min(promised, start)
            if soon:
                place = tuple((self._cluster.names[part.host], part.slots) for part in parts)
            self._share.charge(job.owner, ranks, seconds)
            if ranks > LARGE * sum(self._usable.slots):
                self._assumed = None
        self._promised[job.id] = Promise(promised, place)

    def _promise_so_far(self, job: Waiting) -> float:
        """The earliest start that it was given, unless jobs ahead of it have started since."""
        return math.inf if self._starts else self._snapshot.promised.get(job.id, Promise()).start

    def _preempt(self, job: Waiting, shape: Shape, least: int) -> int:
        """Stop jobs of lower priority if that makes room sooner. Returns for how many ranks; 0: nothing stops."""
        lower = [
            Candidate(other, self._ends[other.id])
            for other in self._preemptible.values()
            if other.priority < job.priority and self._ends[other.id].parts
        ]
        spaces = self._timeline.spaces_from(self._soon) if lower else []
        if not lower or room_in(spaces, shape) >= least:
            return 0
        for ranks in (job.needs.num_ranks, least):
            victims = choose_victims(spaces, lower, shape, ranks)
            for victim in victims:
                self._ends[victim.job.id] = self._timeline.give_back_earlier(victim.end, self._soon)
                del self._preemptible[victim.job.id]
                self._preempts.append(Preempt(victim.job.id, job.id))
            if victims:
                return ranks
        return 0


class _Queue:
    """The jobs that wait, seen from the one that is looked at."""

    def __init__(self) -> None:
        self._last: Waiting | None = None
        self._higher: Waiting | None = None
        self._other: Waiting | None = None

    def ahead_of(self, job: Waiting) -> tuple[Waiting | None, Waiting | None]:
        """The last waiting job of higher priority, and the last one of the same priority but of another owner."""
        last, self._last = self._last, job
        if last is not None and last.priority > job.priority:
            self._higher, self._other = last, None
        elif last is not None and last.owner != job.owner:
            self._other = last
        return self._higher, self._other
