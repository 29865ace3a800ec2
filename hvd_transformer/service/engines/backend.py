"""What every engine can do: take an attempt, say how all attempts are, and stop them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from hvd_transformer.service.jobs import Job
from hvd_transformer.service.launching.attempt_files import AttemptFiles


class EngineFault(Exception):
    """The scheduler could not be asked: its command is missing, fails or hangs. It is asked again later."""


class OverLimit(EngineFault):
    """The scheduler takes no more attempts like this one for now. It may take others."""


class Ended(Enum):
    """How the scheduler says that an attempt has ended."""

    EXITED = "exited"
    CANCELLED = "cancelled"  # by somebody
    LOST = "lost"  # a node failed
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True)
class Sighting:
    """How an attempt is. `words`: the same for its user; `ended`: None while it waits or runs."""

    external: str
    words: str
    runs: bool = False
    ended: Ended | None = None
    code: int | None = None  # of EXITED; None: not known


@dataclass(frozen=True)
class Submission:
    """An attempt that an engine is to start. `file`: the text of the job file.

    `name` belongs to this attempt alone, so that it is found again if its submission was interrupted; `claim` is the
    name of what all attempts of the job share. `seconds`: the running time that is left; None: no limit.
    """

    name: str
    claim: str
    service: str
    job: Job
    number: int
    file: str
    seconds: float | None
    values: Mapping[str, str]  # environment variables for the ranks, which may be secret
    code: Path | None = None  # the modules of the user

    @property
    def files(self) -> AttemptFiles:
        """What it leaves."""
        return files_of(self.job, self.number)


class Backend(Protocol):
    """One engine. Every method runs commands: it blocks, and may raise `EngineFault`."""

    title: str  # such as "Slurm"

    def look(self, wanted: Mapping[str, str | None]) -> Mapping[str, Sighting]:
        """How the attempts of these names are; those that the scheduler does not know are left out.

        The values are their ids there; None: not known. Thousands take as few commands as one.
        """

    def gone(self, external: str) -> Sighting:
        """How an attempt ended that the scheduler does not know any more."""

    def submit(self, attempt: Submission) -> str:
        """Hand an attempt over; returns its id.

        Raises `UserError` if the scheduler refuses it for good, and `OverLimit` if it refuses it for now.
        """

    def stop(self, sightings: Sequence[Sighting], now: bool) -> None:
        """Let the ranks of these attempts save and end, or with `now` kill them."""

    def clean(self, claim: str) -> None:
        """Remove the values of a job that has ended: it has no attempt there any more."""


def files_of(job: Job, number: int) -> AttemptFiles:
    """What an attempt leaves in its run directory: hosts of other schedulers do not see the spool folder."""
    return AttemptFiles(Path(job.output_dir) / ".attempts", number)
