"""The bodies of requests and answers, of which the OpenAPI document is made. Times are seconds since the epoch."""

from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hvd_transformer.service.jobs import Engine, State
from hvd_transformer.service.storage.tokens import Role

Name = Annotated[str, Field(min_length=1, max_length=100)]
Tags = Annotated[list[Name], Field(max_length=100)]
Ids = Annotated[list[Annotated[int, Field(ge=1, lt=10**18)]], Field(min_length=1, max_length=10_000)]


class Body(BaseModel):
    """What a client sends: an unknown field is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Answer(BaseModel):
    """What the service sends. NaN and infinities are null."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class Order(str, Enum):
    ASC = "asc"
    DESC = "desc"


class Failure(Answer):
    """Why a request was refused."""

    error: str = Field(description="one line")


class Login(Body):
    token: Annotated[str, Field(max_length=1000)]


class Nothing(Body):
    """An empty object."""


class Me(Answer):
    """Who the client is. `queue` is false where the service only shows run directories."""

    owner: str
    role: Role
    version: str
    queue: bool
    csrf: str = Field(description="value of the header X-CSRF of changes; empty without a cookie")
    events: str = Field(description="Last-Event-ID with which GET /api/v1/events tells all that happens from now on")


class Needs(Answer):
    num_ranks: int
    min_ranks: int
    tensor: int
    gpus_per_rank: int


class Placement(Answer):
    host: str
    ranks: int
    gpus: list[int]


class Job(Answer):
    """A job. `run`: the id of its run; `allocation`: where it runs now."""

    id: int
    name: str
    owner: str
    state: State
    priority: int
    submitted: float
    needs: Needs
    output_dir: str
    folder: str
    words: list[str]
    launch: list[str]
    engine: Engine
    sbatch: list[str]
    code: str
    env_names: list[str]
    tags: list[str]
    after: list[int]
    array: int | None
    time_limit: float | None
    max_retries: int
    retries: int
    stopping: str | None
    reason: str
    estimated_start: float | None
    ended: float | None
    run: str
    allocation: list[Placement]


class Attempt(Answer):
    """One start of a job."""

    number: int
    allocation: list[Placement]
    began: float
    ended: float | None
    first_step: int | None
    last_step: int | None
    code: int | None
    cause: str
    external: str | None = Field(description="its id in Slurm or Kubernetes")


class JobDetails(Job):
    config: dict[str, Any] = Field(description="the resolved configuration by dotted key")
    attempts: list[Attempt]


class Jobs(Answer):
    items: list[Job]
    next: str | None = Field(description="cursor of the next page; null: this is the last one")


class Submitted(Answer):
    ids: list[int]
    jobs: list[Job]


class Cancel(Body):
    now: bool = Field(False, description="do not wait for a checkpoint")


class Priority(Body):
    priority: Annotated[int, Field(ge=-1000, le=1000)]


class ChangeTags(Body):
    add: Tags = []
    remove: Tags = []


class TagRuns(ChangeTags):
    """`runs`: without a job."""

    runs: Annotated[list[Annotated[str, Field(pattern="^[0-9a-f]{12}$")]], Field(min_length=1, max_length=10_000)]


class RunsTagged(Answer):
    done: list[str]
    errors: dict[str, str] = Field(description="why runs were not changed, by id")


class Bulk(Body):
    ids: Ids
    action: Literal["cancel", "hold", "release", "retry", "tags"]
    now: bool = False
    add: Tags = []
    remove: Tags = []


class BulkDone(Answer):
    done: list[int]
    errors: dict[int, str] = Field(description="why jobs were not changed, by id")


class Row(Answer):
    """A run, a job, or both: a job that has not begun has no run directory, and a run may have no job."""

    id: str
    name: str
    state: str = Field(description="the job's, else RUNNING, FINISHED, STOPPED, FAILED or UNKNOWN")
    job: Job | None
    user: str | None
    tags: list[str]
    step: int | None
    total_steps: int | None
    epoch: float | None
    metrics: dict[str, float | None]
    best: dict[str, Any]
    task: str | None
    world: int | None
    tokens_per_second: float | None
    began: float | None
    updated: float | None
    estimated_end: float | None
    cause: str = Field(description="why its last launch ended")
    problem: str = Field(description="what of it cannot be read, and why; empty: nothing")
    config: dict[str, Any] = Field(description="the keys that were asked for; all of them for a single run")


class Rows(Answer):
    items: list[Row]
    next: str | None
    total: int = Field(description="number of runs that match")
    keys: list[str] = Field(description="metrics that any of them has")
    notes: list[str] = Field([], description="lines for users: which runs may be missing, and why")


class Rank(Answer):
    """How a rank is. `age`: seconds since its last sign of life; `memory`: bytes."""

    rank: int
    host: str
    step: int
    phase: str
    waits_for: str | None
    age: float
    memory: int | None = None
    work_seconds: float | None = Field(None, description="of its own per step, without waiting for other ranks")
    work_ratio: float | None = Field(None, description="its work divided by the median of the other ranks")
    tokens_per_second: float | None
    late: bool


class Checkpoint(Answer):
    step: int
    bytes: int
    time: float
    best: bool
    latest: bool
    metrics: dict[str, float | None]


class StepSamples(Answer):
    step: int
    samples: list[dict[str, str]] = Field(description='texts by name, such as "prompt" and "continuation"')


class RunDetails(Row):
    """A run and what its run directory holds, which is empty for a job that has not begun."""

    attempts: list[Attempt]
    ranks: list[Rank] = []
    checkpoints: list[Checkpoint] = []
    late: str | None = Field(None, description="which rank the others wait for")
    samples: list[StepSamples] = Field([], description="texts that the model wrote at the last evaluations")
    logs: list[str] = Field([], description="values of rank in the log's address")
    summary: dict[str, Any] = {}


class Points(Answer):
    """Points of one metric; `n`: how many there are in the range, of which these are the smallest and largest."""

    x: list[float]
    y: list[float | None]
    n: int


class Metrics(Answer):
    """`complete`: false while the service is still reading a long file; ask again then."""

    keys: dict[str, Points]
    available: list[str]
    last_step: int | None
    complete: bool = True


class LogPage(Answer):
    text: str
    offset: int
    next: int = Field(description="offset to read on from")
    size: int


class Comparison(Answer):
    """`differs`, `final`: a value per run, null where it has none. `missing`: ids of no run."""

    runs: list[Row]
    differs: dict[str, list[Any]]
    final: dict[str, list[float | None]]
    missing: list[str]


class Use(Answer):
    """Slots of a host that are in use. `job` is null for a launch outside the service."""

    job: int | None
    run: str | None
    ranks: int
    gpus: list[int]
    owner: str
    name: str


class Host(Answer):
    name: str
    slots: int
    gpus: list[int]
    threads: int
    drained: bool
    down: str
    used: list[Use]
    load: float | None
    findings: list[str]


class Hosts(Answer):
    items: list[Host]


class AddHosts(Body):
    hosts: Annotated[str, Field(min_length=1, max_length=100_000, description="such as h1:4,h2:4")]
    gpus: dict[str, list[Annotated[int, Field(ge=0, le=1023)]]] = Field({}, description="GPU numbers by host")


class NewToken(Body):
    name: Name
    owner: Name
    role: Role
    expires: float | None = Field(None, gt=0)


class Secret(Answer):
    token: str = Field(description="the secret: it is shown this once")


class Token(Answer):
    id: int
    name: str
    owner: str
    role: Role
    created: float
    last_used: float | None = Field(description="to the hour")
    expires: float | None


class TokenList(Answer):
    items: list[Token]


class Health(Answer):
    status: Literal["ok"]
