"""What a user submits: a job that has no id and no state yet."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hvd_transformer.service.jobs import Engine, Needs


@dataclass(frozen=True)
class NewJob:
    """The fields of `Job` that are known when it is submitted; `jobs.ID` in `output_dir` stands for its id.

    `array`: it belongs to the array of those that are added with it.
    """

    name: str
    owner: str
    submitted: float
    needs: Needs
    output_dir: str
    folder: str
    words: Sequence[str]
    priority: int = 0
    launch: Sequence[str] = ()
    engine: Engine = Engine.HOSTS
    sbatch: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    env_names: Sequence[str] = ()
    env_file: str | None = None
    tags: Sequence[str] = ()
    after: Sequence[int] = ()
    time_limit: float | None = None
    max_retries: int = 3
    held: bool = False
    array: bool = False


def digest(jobs: Sequence[NewJob], body: str | None) -> bytes:
    """Tells whether two requests are the same: `body` as it was sent, or else the jobs but for their time."""
    if body is None:
        body = json.dumps([{**asdict(job), "submitted": None} for job in jobs], sort_keys=True)
    return hashlib.sha256(body.encode()).digest()
