"""A cluster that lives in simulated time under the scheduler of the service: jobs come, run, stop, grow and end.

Every pass is checked: no slot and no GPU is given twice, nothing starts on a host that takes nothing new, every
allocation has the size and the whole tensor groups that its job needs.
"""

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_transformer.service.jobs import Allocation, Host, Needs
from hvd_transformer.service.scheduling.fair_share import decayed
from hvd_transformer.service.scheduling.run_length import median_length
from hvd_transformer.service.scheduling.scheduler import schedule
from hvd_transformer.service.scheduling.snapshot import Decisions, Promise, Running, Snapshot, Waiting

STOP_SECONDS, RESTART_SECONDS = 30.0, 60.0


@dataclass(frozen=True)
class Work:
    """A job as it is in truth: it runs for `seconds` on all its ranks. Those of one `kind` have the same settings."""

    id: int
    owner: str
    submitted: float
    seconds: float
    needs: Needs
    priority: int = 0
    kind: int | None = None


@dataclass(frozen=True)
class Knowledge:
    """What the scheduler is told of run times.

    `limited`: the share of jobs with a time limit, which is up to `limit` times their true length. Running jobs:
    `after` so many seconds, the true end, but their rest is wrong by a log-normal factor with this `error`. `kinds`: a
    waiting job counts as long as the one of its kind whose speed was known last. `recent`: the scheduler knows how long
    recent jobs ran. Nothing else is known of jobs before they start.
    """

    limited: float = 0.0
    limit: float = 3.0
    after: float = 120.0
    error: float = 0.1
    kinds: bool = False
    recent: bool = False


TRUTH = Knowledge(limited=1.0, limit=1.0, after=0.0, error=0.0)


@dataclass
class _Job:
    work: Work
    left: float  # seconds on all ranks
    limit: float | None
    error: float
    allocation: Allocation = ()
    began: float = 0.0
    resumes: float = 0.0  # it starts up until then
    looked: float = 0.0
    stops: float = math.inf
    expected: float | None = None  # its end, as it was thought of at the start
    first_start: float | None = None
    ended: float | None = None

    @property
    def ranks(self) -> int:
        return sum(placement.ranks for placement in self.allocation)

    @property
    def end(self) -> float:
        return max(self.looked, self.resumes) + self.left * self.work.needs.num_ranks / self.ranks

    def advance(self, now: float) -> None:
        self.left -= max(0.0, now - max(self.looked, self.resumes)) * self.ranks / self.work.needs.num_ranks
        self.looked = now


@dataclass
class Report:
    """`busy`: slot-seconds per owner between `since` and the end. `jobs`: id → when it first started, when it ended."""

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    jobs: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    passes: int = 0
    preempted: int = 0
    grown: int = 0


class SimulatedCluster:
    """`run` lives through the given works once."""

    def __init__(self, hosts: Sequence[Host], works: Iterable[Work], knowledge: Knowledge, seed: int = 0) -> None:
        self._hosts, self._knowledge = hosts, knowledge
        chance = random.Random(seed)
        self._jobs = {work.id: self._job(work, chance) for work in works}
        self._arrivals = [(job.work.submitted, job.work.id) for job in self._jobs.values()]
        heapq.heapify(self._arrivals)
        self._waiting: dict[int, _Job] = {}
        self._running: dict[int, _Job] = {}
        self._usage: dict[str, float] = defaultdict(float)
        self._promised: Mapping[int, Promise] = {}
        self._recent: deque[float] = deque(maxlen=500)  # seconds that jobs ran
        self._of_kind: dict[int, float] = {}  # seconds of a job of this kind
        self._now = 0.0
        self.report = Report()

    def run(self, until: float, since: float = 0.0) -> Report:
        """Counts usage from `since` on; ends at `until` or when nothing is left."""
        while self._arrivals or self._waiting or self._running:
            moment = min(self._next(), until)
            self._account(moment, since)
            if moment >= until:
                break
            self._settle()
            self._apply(schedule(self._snapshot()))
        self.report.jobs = {job.work.id: (job.first_start, job.ended) for job in self._jobs.values()}
        return self.report

    def _next(self) -> float:
        times = [min(job.end, job.stops) for job in self._running.values()]
        times += [job.began + self._knowledge.after for job in self._running.values() if self._unknown(job)]
        if self._arrivals:
            times.append(self._arrivals[0][0])
        assert times, f"{len(self._waiting)} jobs wait on an empty cluster"
        return max(self._now, min(times))

    def _job(self, work: Work, chance: random.Random) -> _Job:
        limit = work.seconds * chance.uniform(1.0, self._knowledge.limit)
        known = chance.random() < self._knowledge.limited
        return _Job(work, work.seconds, limit if known else None, math.exp(chance.gauss(0.0, self._knowledge.error)))

    def _unknown(self, job: _Job) -> bool:
        """Whether it has run too shortly to tell its speed."""
        return self._now < job.began + self._knowledge.after

    def _expected_end(self, job: _Job) -> float | None:
        if not self._unknown(job):
            return self._now + (job.end - self._now) * job.error
        limit = None if job.limit is None else job.began + job.limit
        return min((end for end in (job.expected, limit) if end is not None and end > self._now), default=limit)

    def _seconds(self, job: _Job) -> float | None:
        """How long a waiting job is thought to run."""
        known = None if job.work.kind is None else self._of_kind.get(job.work.kind)
        left = None if known is None else known * job.left / job.work.seconds
        return min((seconds for seconds in (left, job.limit) if seconds is not None), default=None)

    def _learn(self, job: _Job) -> None:
        """What the service sees of a running job, or one that has just ended."""
        if self._knowledge.kinds and job.work.kind is not None and not self._unknown(job):
            self._of_kind[job.work.kind] = job.work.seconds * job.error
        if self._knowledge.recent and job.ended is not None:
            self._recent.append(job.work.seconds)

    def _account(self, moment: float, since: float) -> None:
        passed, counted = moment - self._now, max(0.0, moment - max(since, self._now))
        for owner in self._usage:
            self._usage[owner] = decayed(self._usage[owner], passed)
        for job in self._running.values():
            job.advance(moment)
            self._usage[job.work.owner] += job.ranks * passed
            self.report.busy[job.work.owner] += job.ranks * counted
        self._now = moment

    def _settle(self) -> None:
        """Jobs that came, ended or have stopped by now."""
        while self._arrivals and self._arrivals[0][0] <= self._now:
            _, number = heapq.heappop(self._arrivals)
            self._waiting[number] = self._jobs[number]
        for number, job in list(self._running.items()):
            ended, stopped = job.end <= self._now + 1e-6, job.stops <= self._now
            if ended or stopped:
                del self._running[number]
                job.allocation, job.stops = (), math.inf
                if ended:
                    job.ended = self._now
                else:
                    self._waiting[number] = job
            self._learn(job)

    def _snapshot(self) -> Snapshot:
        waiting = [
            Waiting(number, job.work.owner, job.work.priority, job.work.submitted, job.work.needs, self._seconds(job))
            for number, job in self._waiting.items()
        ]
        running = [
            Running(
                number,
                job.work.owner,
                job.work.priority,
                job.work.needs,
                job.allocation,
                job.began,
                self._expected_end(job),
                math.isfinite(job.stops),
            )
            for number, job in self._running.items()
        ]
        median = median_length(self._recent)
        return Snapshot(self._now, self._hosts, waiting, running, self._usage, (), self._promised, median)

    def _apply(self, decisions: Decisions) -> None:
        self.report.passes += 1
        self._promised = decisions.promised
        self.report.preempted += len(decisions.preempts)
        self.report.grown += len(decisions.grows)
        for start in decisions.starts:
            job = self._running[start.job] = self._waiting.pop(start.job)
            seconds = self._seconds(job)
            job.expected = None if seconds is None else self._now + seconds
            job.allocation, job.began, job.looked, job.resumes = start.allocation, self._now, self._now, self._now
            job.first_start = self._now if job.first_start is None else job.first_start
        for preempt in decisions.preempts:
            self._running[preempt.victim].stops = self._now + STOP_SECONDS
        for grow in decisions.grows:
            job = self._running[grow.job]
            job.allocation, job.resumes = grow.allocation, self._now + RESTART_SECONDS
        assert set(decisions.reasons) == set(self._waiting)
        check_allocations(self._hosts, [(job.work.needs, job.allocation) for job in self._running.values()])


def check_allocations(hosts: Sequence[Host], given: Iterable[tuple[Needs, Allocation]]) -> None:
    """Raises `AssertionError` if a slot or a GPU is given twice, or if an allocation is not what its job needs."""
    slots = {host.name: host.slots for host in hosts}
    gpus = {host.name: set(host.gpus) for host in hosts}
    for needs, allocation in given:
        assert needs.min_ranks <= sum(placement.ranks for placement in allocation) <= needs.num_ranks
        for placement in allocation:
            slots[placement.host] -= placement.ranks
            assert placement.ranks > 0
            assert slots[placement.host] >= 0, f"{placement.host}: more slots than it has"
            assert len(placement.gpus) == placement.ranks * needs.gpus_per_rank
            assert gpus[placement.host].issuperset(placement.gpus), f"{placement.host}: a GPU twice"
            gpus[placement.host].difference_update(placement.gpus)
