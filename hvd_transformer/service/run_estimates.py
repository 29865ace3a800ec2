"""When running jobs are likely to end, and what their speed tells of others of their kind."""

from collections.abc import Callable
from pathlib import Path

from hvd_transformer.service.jobs import Attempt, Job, State
from hvd_transformer.service.runs.pace import Progress
from hvd_transformer.service.scheduling.run_length import Pace
from hvd_transformer.service.storage.store import Store

_CHANGED = 0.1  # the part by which a speed must change to be written


class RunEstimates:
    """Estimated ends of active jobs. `progress`: how far the run in a folder is, None if unknown."""

    def __init__(self, store: Store, progress: Callable[[Path], Progress | None]) -> None:
        self._store, self._progress = store, progress
        self._expected: dict[int, float] = {}  # ends as they were thought of at the start
        self._ends: dict[int, float] = {}
        self._noted: dict[int, Pace] = {}

    def began(self, attempt: Attempt, seconds: float | None) -> None:
        """An attempt begins that is expected to take so long; None: unknown."""
        if seconds is not None:
            self._expected[attempt.job] = attempt.began + seconds

    def ended(self, job: int) -> None:
        """Forget a job's attempt."""
        for known in (self._expected, self._ends, self._noted):
            known.pop(job, None)

    def end(self, job: int) -> float | None:
        """When this job is likely to end, as of the last look; None: unknown."""
        return self._ends.get(job)

    def look(self, job: Job, attempt: Attempt, deadline: float | None, now: float) -> float | None:
        """When this job is likely to end: from its speed, or from what was expected as long as it has told none."""
        progress = self._progress(Path(job.output_dir)) if job.state is State.RUNNING else None
        end = self._expected.get(job.id)
        if end is not None and end < now:
            end = None
        if progress is not None and progress.seconds_left is not None:
            end = now + progress.seconds_left
            self._note(job, attempt, progress, now)
        ends = [time for time in (end, deadline) if time is not None]
        self._ends.pop(job.id, None)
        if ends:
            self._ends[job.id] = min(ends)
        return self.end(job.id)

    def _note(self, job: Job, attempt: Attempt, progress: Progress, now: float) -> None:
        if progress.seconds_per_step is None:
            return
        total = None if job.config.get("training.max_steps") is not None else progress.total_steps
        pace = Pace(progress.seconds_per_step, total, sum(part.ranks for part in attempt.allocation))
        noted = self._noted.get(job.id)
        if noted is None or noted[1:] != pace[1:] or _differs(noted.seconds_per_step, pace.seconds_per_step):
            self._store.put_pace(job.id, pace, now)
            self._noted[job.id] = pace


def _differs(old: float, new: float) -> bool:
    return abs(new - old) > _CHANGED * old
