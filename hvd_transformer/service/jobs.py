"""What the parts of the service talk about: jobs, their attempts, what they need, and where they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

LONGEST_NUMBER = 18  # digits: SQLite's numbers have 63 bits


class State(str, Enum):
    """Where a job is.

    HELD ⇄ QUEUED → STARTING → RUNNING → SUCCEEDED or FAILED; STOPPING ends in CANCELLED, or in QUEUED if the job was
    preempted. A lost job goes back to QUEUED.
    """

    HELD = "HELD"
    QUEUED = "QUEUED"
    STARTING = "STARTING"  # it has its slots; its launcher has been started
    RUNNING = "RUNNING"  # its ranks run
    STOPPING = "STOPPING"  # its ranks save
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


WAITING = frozenset({State.HELD, State.QUEUED})
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.STOPPING})  # it has slots
ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})


class Cause(str, Enum):
    """Why a job is being stopped, and what then becomes of it."""

    CANCELLED = "cancelled"  # → CANCELLED
    KILLED = "killed"  # → CANCELLED, without saving
    PREEMPTED = "preempted"  # → QUEUED
    TIME_LIMIT = "time limit"  # → FAILED
    HELD = "held"  # → HELD


class Engine(str, Enum):
    """What runs a job: the service itself on its hosts, or another scheduler, to which the service sends it."""

    HOSTS = "hosts"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True)
class Needs:
    """What a job asks of the hosts: all of it or nothing.

    `tensor`: ranks of one tensor-parallel group; every host gets whole groups where a group fits on one.
    `gpus_per_rank`: pipeline stages on GPUs; 0 on CPUs. Elastic jobs have `min_ranks` below `num_ranks`.
    """

    num_ranks: int
    min_ranks: int
    tensor: int = 1
    gpus_per_rank: int = 0


@dataclass(frozen=True)
class Placement:
    """The part of one job on one host. A rank takes one slot and, with GPUs, `gpus_per_rank` of their numbers."""

    host: str
    ranks: int
    gpus: tuple[int, ...] = ()


Allocation = tuple[Placement, ...]

# In the `output_dir` of a job that is being added: the store writes the job's id there, or that of the first job of its
# array.
ID = "{id}"


@dataclass(frozen=True)
class Host:
    """A host that jobs may use. `gpus`: their numbers there. `threads`: CPU threads per slot, 0 if not known."""

    name: str
    slots: int
    gpus: tuple[int, ...] = ()
    threads: int = 0
    drained: bool = False  # takes no new job
    down: str = ""  # why it cannot be used now; empty: it can


@dataclass(frozen=True)
class Attempt:
    """One start of a job. Times are seconds since the epoch."""

    job: int
    number: int  # from 1
    allocation: Allocation
    began: float
    ended: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    code: int | None = None
    cause: str = ""  # why it ended
    external: str | None = None  # its id in Slurm or Kubernetes

    @property
    def seconds(self) -> float:
        """How long it ran; 0 if it has not ended, or if the clock was set back meanwhile."""
        return 0.0 if self.ended is None else max(0.0, self.ended - self.began)


@dataclass(frozen=True)
class Job:
    """A job of the queue.

    `words`: the arguments of hvd-train, complete; `launch`: options of `launch`, with hosts only if `engine` is another
    scheduler: it takes their number and their slots.
    """

    id: int
    name: str
    owner: str
    state: State
    priority: int
    submitted: float
    needs: Needs
    output_dir: str  # absolute
    folder: str  # where it was submitted
    words: Sequence[str]
    launch: Sequence[str] = ()
    engine: Engine = Engine.HOSTS
    sbatch: Sequence[str] = ()  # more options of sbatch
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved, by dotted key
    code: str = ""  # the snapshot of the user's own code: its folder's name in STATE/code; empty: none
    env_names: Sequence[str] = ()
    env_file: str | None = None  # has the values of `env_names`; read when the job starts
    tags: Sequence[str] = ()
    after: Sequence[int] = ()  # jobs that must have succeeded
    array: int | None = None  # the first job of its array
    time_limit: float | None = None  # seconds of running
    max_retries: int = 3  # after 75 and lost hosts
    retries: int = 0
    stopping: Cause | None = None
    reason: str = ""  # why it waits, or why it ended, in words
    estimated_start: float | None = None
    ended: float | None = None

    @property
    def run_name(self) -> str:
        """The name by which tables show its run, also before there is one: that of its folder."""
        return "/".join(Path(self.output_dir).parts[-1 if self.array is None else -2 :])
