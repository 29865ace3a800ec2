"""What the scheduler sees, and what it decides."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_transformer.service.jobs import Allocation, Engine, Host, Needs, Placement


@dataclass(frozen=True)
class Waiting:
    """A job that may start: queued, with all its dependencies done.

    `submitted` also is its place in the queue: a preempted job keeps it. `seconds`: how long it will run, estimated
    (the steps left at the speed of an earlier attempt or of similar jobs, at most its time limit); None: unknown.
    """

    id: int
    owner: str
    priority: int
    submitted: float
    needs: Needs
    seconds: float | None = None
    engine: Engine = Engine.HOSTS  # jobs of others are no matter of this scheduler


@dataclass(frozen=True)
class Running:
    """A job that has slots. `expected_end`: estimated from its speed and the steps left; None: unknown."""

    id: int
    owner: str
    priority: int
    needs: Needs
    allocation: Allocation
    began: float
    expected_end: float | None = None
    stopping: bool = False  # its slots are about to be free


@dataclass(frozen=True)
class Promise:
    """A reservation. `start`: the earliest estimate; infinite: unknown. `place`: set if the job is about to start.

    It then starts there, with these ranks. Elsewhere, or with more ranks, it could take slots that others were stopped
    to free for another job.
    """

    start: float = math.inf
    place: tuple[tuple[str, int], ...] = ()  # host, ranks


@dataclass(frozen=True)
class Snapshot:
    """Everything a pass of the scheduler looks at.

    `usage`: decayed slot-seconds of each owner up to now, running jobs included. `taken`: slots that launches outside
    the service use. `promised`: that of the decisions before, in its order. `median_seconds`: how long recent jobs ran;
    None: unknown.
    """

    now: float
    hosts: Sequence[Host]
    waiting: Sequence[Waiting]
    running: Sequence[Running]
    usage: Mapping[str, float] = field(default_factory=dict)
    taken: Sequence[Placement] = ()
    promised: Mapping[int, Promise] = field(default_factory=dict)
    median_seconds: float | None = None


@dataclass(frozen=True)
class Start:
    """Start this waiting job there."""

    job: int
    allocation: Allocation


@dataclass(frozen=True)
class Preempt:
    """Stop the running job `victim`: it gives its slots to `for_job` and waits again."""

    victim: int
    for_job: int


@dataclass(frozen=True)
class Grow:
    """Give this running elastic job the whole of `allocation`, which includes what it has."""

    job: int
    allocation: Allocation


@dataclass(frozen=True)
class Decisions:
    """What to do now.

    `reasons`: why each job that does not start waits. `estimated_starts`: of those with a reservation, if known.
    `promised`: all with a reservation, in order. The next pass needs it: so large jobs are neither overtaken nor put
    off again and again.
    """

    starts: Sequence[Start]
    preempts: Sequence[Preempt]
    grows: Sequence[Grow]
    reasons: Mapping[int, str]
    estimated_starts: Mapping[int, float]
    promised: Mapping[int, Promise]
