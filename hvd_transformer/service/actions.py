"""What users and admins do with jobs and hosts: each action is a change in the database; the manager does the rest.

Who may do it is for the caller to check.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import parse_hosts
from hvd_transformer.service.jobs import ACTIVE, ENDED, Cause, Host, Job, State
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.submitting.request import check_tags
from hvd_transformer.service.submitting.submission import Request, prepare


class Actions:
    """Any thread may call them. `wake` tells the manager that something has changed, `kill` not to let a job save.

    All raise `UserError` where the state of a job or host does not allow it.
    """

    def __init__(
        self,
        store: Store,
        checker: Checker,
        runs: Path,
        wake: Callable[[], object],
        kill: Callable[[int], object],
    ) -> None:
        self._store, self._checker, self._runs, self._kill = store, checker, runs, kill
        self._wake = partial(store.database.after_commit, wake)
        self._submitting = threading.Lock()  # from the check of the folders to the jobs in the database

    def submit(self, request: Request, owner: str, key: str | None) -> list[Job]:
        """Queue the jobs of a request. `key`: with one that the owner has used before, nothing is added twice."""
        body = request.model_dump_json()
        with self._submitting:  # also who sends a request again, while the first one is still being checked
            ids = None if key is None else self._store.submitted_before(owner, key, body)
            if ids is None:
                hosts = self._store.hosts()
                new = prepare(request, owner, self._runs, hosts, self._checker, self._store)
                ids = self._store.add_jobs(new, key, body)
                self._wake()
        return [job for job in map(self._store.job, ids) if job is not None]

    def cancel(self, id: int, now: bool = False) -> Job:
        """End a job for good; its ranks save, or with `now` are killed."""
        with self._store.batch():  # it neither starts nor ends in between
            job = self._known(id)
            if job.state in ENDED:
                raise UserError(f"job {id} has ended: {job.state.value}")
            if job.state in ACTIVE:
                job = self._store.update(id, state=State.STOPPING, stopping=Cause.KILLED if now else Cause.CANCELLED)
                if now:
                    self._kill(id)
            else:
                job = self._store.update(id, state=State.CANCELLED, reason="cancelled", ended=time.time())
        self._wake()
        return job

    def retry(self, id: int) -> Job:
        """Queue a job again that failed or was cancelled; it resumes from its last checkpoint.

        Not while another job, such as a later one that has continued it, uses its run directory.
        """
        with self._store.batch():  # nobody else changes it in between
            job = self._known(id)
            if job.state not in (State.FAILED, State.CANCELLED):
                raise UserError(f"job {id} is {job.state.value}: only FAILED and CANCELLED jobs can be retried")
            ran = sum(attempt.seconds for attempt in self._store.attempts(id))
            if job.time_limit is not None and ran >= job.time_limit:
                raise UserError(
                    f"job {id} has used up its time limit; submit it again with a longer one, and with "
                    f"output_dir={job.output_dir} to resume"
                )
            job = self._store.update(id, state=State.QUEUED, retries=0)
        self._wake()
        return job

    def hold(self, id: int) -> Job:
        """Keep a job from starting; one that runs saves and gives its slots back."""
        with self._store.batch():  # it neither starts nor ends in between
            job = self._known(id)
            if job.state in ENDED:
                raise UserError(f"job {id} has ended: {job.state.value}")
            if job.state not in ACTIVE:
                job = self._store.update(id, state=State.HELD)
            elif job.state is State.STOPPING:
                raise UserError(f"job {id} is being stopped")
            else:
                job = self._store.update(id, state=State.STOPPING, stopping=Cause.HELD)
        self._wake()
        return job

    def release(self, id: int) -> Job:
        """Queue a job that was held."""
        with self._store.batch():  # nobody cancels it in between
            job = self._known(id)
            if job.state is not State.HELD:
                raise UserError(f"job {id} is {job.state.value}: it is not held")
            job = self._store.update(id, state=State.QUEUED)
        self._wake()
        return job

    def set_priority(self, id: int, priority: int) -> Job:
        """Change the place in the queue, and who may be preempted."""
        if (job := self._known(id)).state in ENDED:
            raise UserError(f"job {id} has ended: {job.state.value}")
        job = self._store.update(id, priority=priority)
        self._wake()
        return job

    def set_tags(self, id: int, add: Sequence[str], remove: Sequence[str]) -> Job:
        """Add tags to a job and remove some."""
        check_tags(add)
        return self._store.set_tags(id, add, remove)

    def add_hosts(self, hosts: str, gpus: Mapping[str, Sequence[int]]) -> list[Host]:
        """Add hosts, such as "h1:4,node[01-08]:8", or change their slots and GPUs.

        `gpus`: their numbers, by host. A host that is not named there keeps its GPUs; one without numbers loses them.
        """
        new = []
        for found in parse_hosts(hosts):
            numbers = tuple(gpus.get(found.name, found.gpus))
            if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
                raise UserError(f"host {found.name}: the numbers of its GPUs must be different ones from 0")
            new.append(Host(found.name, found.slots, numbers))
        if unknown := gpus.keys() - {host.name for host in new}:
            raise UserError(f"GPUs of host {min(unknown)}: it is not among the hosts that are added")
        self._store.put_hosts(new, [name for name, numbers in gpus.items() if not numbers])
        self._wake()
        return new

    def drain(self, name: str) -> None:
        """Give a host no new job; those that run there go on."""
        self._store.set_drained(name, True)
        self._wake()

    def resume(self, name: str) -> None:
        """Let a drained host have jobs again."""
        self._store.set_drained(name, False)
        self._wake()

    def remove_host(self, name: str) -> None:
        """Forget a host that no job uses."""
        self._store.remove_host(name)
        self._wake()

    def _known(self, id: int) -> Job:
        if (job := self._store.job(id)) is None:
            raise UserError(f"job {id}: no such job")
        return job
