"""How running jobs are stopped: time limits, one request to save and stop per attempt, and a kill on demand."""

import time

from hvd_transformer.service.jobs import Attempt, Cause, Job, State
from hvd_transformer.service.launching.attempts import Launchers
from hvd_transformer.service.storage.store import Store


class Stops:
    """The deadlines of active jobs, and which of them were asked to stop. For the manager's thread, but for `kill`."""

    def __init__(self, store: Store, launchers: Launchers) -> None:
        self._store, self._launchers = store, launchers
        self._deadlines: dict[int, float] = {}  # of jobs with a time limit, monotonic: a clock that is set ends none
        self._asked: set[int] = set()  # jobs whose attempt was asked to stop
        self._to_kill: set[int] = set()

    def began(self, job: Job, attempt: Attempt) -> None:
        """An attempt of the job has slots. Its time limit is that of all attempts together."""
        if job.stopping is Cause.KILLED:  # before this service was started
            self._to_kill.add(job.id)
        if job.time_limit is not None:
            before = sum(one.seconds for one in self._store.attempts(job.id))
            used = before + max(0.0, time.time() - attempt.began)  # the clock may have been set back
            self._deadlines[job.id] = time.monotonic() + job.time_limit - used

    def ended(self, job: int) -> None:
        """Forget the attempt of this job."""
        self._deadlines.pop(job, None)
        self._asked.discard(job)
        self._to_kill.discard(job)

    def deadline(self, job: int) -> float | None:
        """When an active job reaches its time limit; None: it has none."""
        deadline = self._deadlines.get(job)
        return None if deadline is None else time.time() + deadline - time.monotonic()

    def kill(self, job: int) -> None:
        """Kill the ranks of a job that is being stopped, in place of letting them save. From any thread."""
        self._to_kill.add(job)
        self._launchers.wake()

    def look(self, job: Job, attempt: Attempt) -> None:
        """Stop an active job that is to be stopped, or that has reached its time limit."""
        deadline = self._deadlines.get(job.id)
        if job.state is State.RUNNING and deadline is not None and time.monotonic() > deadline:
            job = self._store.update(job.id, state=State.STOPPING, stopping=Cause.TIME_LIMIT)
        if job.state is not State.STOPPING:
            return
        if job.id in self._to_kill:
            self._to_kill.discard(job.id)
            self._asked.add(job.id)
            self._launchers.stop(job, attempt, now=True)
        elif job.id not in self._asked:
            self._asked.add(job.id)
            self._launchers.stop(job, attempt, now=False)
