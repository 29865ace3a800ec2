"""The jobs that other schedulers run: hands them over, follows them, stops them and settles their ends.

Every few seconds one pass compares the open attempts of the database with what the schedulers say. All that it needs is
there, so the service may be killed at any moment. An attempt whose id is not in the database may have been submitted:
only once the scheduler does not know its name, which no other attempt has, is it submitted.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvd_transformer.errors import WRONG_INPUT, UserError
from hvd_transformer.service.engines.backend import (
    Backend,
    Ended,
    EngineFault,
    OverLimit,
    Sighting,
    Submission,
    files_of,
)
from hvd_transformer.service.engines.commands import Commands
from hvd_transformer.service.engines.conclusion import conclude
from hvd_transformer.service.jobs import Cause, Engine, Job, State
from hvd_transformer.service.launching.launch_command import secret_values
from hvd_transformer.service.outcome import Exit, not_started
from hvd_transformer.service.settlement import settle
from hvd_transformer.service.storage.external_table import ExternalAttempt
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.code_snapshot import install
from hvd_transformer.service.submitting.not_now import NotNow, SlowFolders, check_folder, error_of

LOOK_SECONDS = 5.0  # between two looks at the schedulers
_LEAST_REST = 1.0  # between them if something has changed meanwhile
_ACCEPT_AT_ONCE = 200  # jobs, in one transaction
_SUBMIT_AT_ONCE = 20  # attempts, between two looks
_WAITED_SECONDS = 60.0  # between two notes of which jobs still wait there

_log = logging.getLogger(__name__)

JobFile = Callable[[Job, str], str]  # the text of the job file, with what it makes named so


class _Unchecked(NotNow):
    """The checking process does not answer: for this job, or for any."""


class ExternalJobs:
    """One thread, from `start` to `close`; jobs go on after `close`.

    `state`: the service's state folder; `commands`: that the backends run; `job_file` raises `UserError`, and
    `NotNow` for what has nothing to do with the job; `wake_manager` is called when an attempt has ended, and `refused`
    with a job that cannot be submitted now, just before it is queued again. `wake`, `accept` and `kill` may be called
    from any thread.
    """

    def __init__(
        self,
        store: Store,
        backends: Mapping[Engine, Backend],
        job_file: JobFile,
        state: Path,
        commands: Commands,
        wake_manager: Callable[[], object] = lambda: None,
        refused: Callable[[int], object] = lambda job: None,
        seconds: float = LOOK_SECONDS,
    ) -> None:
        self._store, self._backends, self._job_file, self._state = store, backends, job_file, state
        self._commands = commands
        self._wake_manager, self._refused, self._seconds = wake_manager, refused, seconds
        self._service = store.service_id()
        stopping = store.jobs([State.STOPPING])  # before this service was started
        self._to_kill = {job.id for job in stopping if job.engine in backends and job.stopping is Cause.KILLED}
        self._waited: dict[int, float] = {}  # by job: when it was submitted, or last seen in the scheduler's queue
        self._waited_written = -math.inf  # monotonic
        self._options: dict[int, tuple[str, ...]] = {}  # of sbatch, by job that is not submitted yet
        self._folders = SlowFolders()
        self._due, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="external jobs", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and the command that it runs."""
        self._closing.set()
        self._due.set()
        self._commands.close()
        self._thread.join()

    def wake(self) -> None:
        """Look soon: a job has changed."""
        self._due.set()

    def accept(self, jobs: Sequence[int]) -> None:
        """Make attempts of some of these queued jobs, the first ones first; call it again with the others."""
        with self._store.batch():
            for job in jobs[:_ACCEPT_AT_ONCE]:
                self._store.start(job, (), time.time())
        self.wake()

    def kill(self, job: int) -> None:
        """Kill the ranks of a job that is being stopped, in place of letting them save."""
        self._to_kill.add(job)
        self.wake()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._due.clear()
            began, active = time.monotonic(), True
            try:
                active = self.look()
            except UserError as error:  # a full disk, for example: nothing has changed, and it is tried again
                _log.error("%s", error)
            except Exception:
                _log.exception("external jobs: it goes on")
            self._closing.wait(max(_LEAST_REST, time.monotonic() - began))
            self._due.wait(self._seconds if active else None)  # nobody is asked about no jobs

    def look(self) -> bool:
        """One pass over all open attempts; returns whether there are any."""
        attempts = self._store.external_attempts()
        for engine, backend in self._backends.items():
            named = {self._name(attempt): attempt for attempt in attempts if attempt.engine is engine}
            if not named:
                continue
            try:
                self._follow(backend, named)
            except EngineFault as fault:
                self._tell(dict.fromkeys(named.values(), f"{backend.title}: {fault}"))
        if time.monotonic() - self._waited_written > _WAITED_SECONDS:
            self._waited_written = time.monotonic()
            self._store.set_waited(self._waited)
        return bool(attempts)

    def _follow(self, backend: Backend, named: Mapping[str, ExternalAttempt]) -> None:
        looked = time.time()
        seen = backend.look({name: attempt.external for name, attempt in named.items()})
        words: dict[ExternalAttempt, str] = {}
        stopping: list[tuple[ExternalAttempt, Sighting]] = []
        unknown: list[ExternalAttempt] = []
        for name, attempt in named.items():
            found = seen.get(name)
            if found is None and attempt.external is not None:
                found = backend.gone(attempt.external)
            if found is None:
                unknown.append(attempt)
                continue
            if found.external != attempt.external:  # the service ended between its submission and this
                self._store.set_external(attempt.job, attempt.number, found.external)
            if found.ended is None and not found.runs:
                self._waited[attempt.job] = looked
            if found.ended is not None:
                try:
                    self._end(attempt, found)
                except NotNow as error:  # the next look sees the same
                    words[attempt] = str(error)
            elif attempt.state is State.STOPPING:
                stopping.append((attempt, found))
            elif found.runs and attempt.state is State.STARTING:
                with suppress(UserError):  # it is being cancelled
                    since = self._waited.get(attempt.job, 0.0)
                    self._store.begin_external(attempt.job, attempt.number, found.words, since)
                    self._waited.pop(attempt.job, None)
            else:
                words[attempt] = found.words
        self._tell(words)
        self._stop(backend, stopping)
        self._submit(backend, unknown)

    def _tell(self, words: Mapping[ExternalAttempt, str]) -> None:
        new = {attempt.job: text for attempt, text in words.items() if text != attempt.reason}
        if new and not self._closing.is_set():  # faults are our own by then
            self._store.set_reasons(new)

    def _stop(self, backend: Backend, stopping: Sequence[tuple[ExternalAttempt, Sighting]]) -> None:
        """Ask once: a second signal would kill ranks that save."""
        to_kill = frozenset(self._to_kill)
        kill = [(attempt, found) for attempt, found in stopping if attempt.job in to_kill]
        save = [(one, found) for one, found in stopping if not (one.asked_to_stop or one.job in to_kill)]
        for group, now in ((kill, True), (save, False)):
            if group:
                backend.stop([found for _, found in group], now)
                self._store.set_asked_to_stop((attempt.job, attempt.number) for attempt, _ in group)
        self._to_kill.difference_update(attempt.job for attempt, _ in kill)

    def _submit(self, backend: Backend, attempts: Sequence[ExternalAttempt]) -> None:
        words, away = dict[ExternalAttempt, str](), dict[ExternalAttempt, str]()
        over: dict[tuple[str, ...], str] = {}  # by options, which name accounts and partitions: the limit they are over
        tried = unchecked = 0
        stopped = [attempt for attempt in attempts if attempt.state is State.STOPPING]
        for attempt in stopped:  # whatever becomes of the others
            self._settle(attempt, not_started("it was stopped before"))
        attempts = [attempt for attempt in attempts if attempt not in stopped]
        for at, attempt in enumerate(attempts):
            if attempt.job not in self._options:
                self._options[attempt.job] = tuple(self._known(attempt).sbatch)
            options = self._options[attempt.job]
            if options in over:  # it waits behind the one that was refused
                words[attempt] = over[options]
                continue
            job = self._known(attempt)
            if job.state is State.STOPPING:
                self._settle(attempt, not_started("it was stopped before"))
                continue
            if tried >= _SUBMIT_AT_ONCE:
                self.wake()
                break
            seconds = self._seconds_left(job)  # not below: a fault of the database is none of the job
            try:
                submission = self._submission(job, attempt, seconds)
                tried += 1
                external = backend.submit(submission)
            except NotNow as error:  # of this job alone: the others do not wait for it
                unchecked += isinstance(error, _Unchecked)
                if unchecked > 1:  # of all jobs
                    words |= dict.fromkeys(attempts[at:], f"{backend.title}: {error}")
                    break
                away[attempt] = not_started(str(error)).cause
                continue
            except UserError as error:
                self._settle(attempt, Exit(WRONG_INPUT, str(error)))
            except OverLimit as fault:
                words[attempt] = over[options] = f"{backend.title}: {fault}"
            except EngineFault as fault:
                words |= dict.fromkeys(attempts[at:], f"{backend.title}: {fault}")
                break
            else:
                self._store.set_external(job.id, attempt.number, external)
                self._waited[job.id] = time.time()
                self._options.pop(job.id)
            unchecked = 0
        self._tell(words)
        self._put_off(away)

    def _put_off(self, away: Mapping[ExternalAttempt, str]) -> None:
        """Queue jobs again, with the reasons why they were not submitted."""
        if not away:
            return
        for attempt in away:  # first, so that they rest as soon as they are queued
            self._refused(attempt.job)
            self._options.pop(attempt.job, None)
        with self._store.batch():
            for attempt, why in away.items():
                self._store.withdraw(attempt.job, attempt.number, why)
        self._wake_manager()  # others of their owners may be handed over

    def _submission(self, job: Job, attempt: ExternalAttempt, seconds: float | None) -> Submission:
        """Raises `UserError` for what is wrong with the job, `NotNow` for a folder that is away, a full disk or a job
        file that cannot be made now.
        """
        claim, run = self._claim(job), Path(job.output_dir)
        attempts = files_of(job, attempt.number).folder
        self._folders.ask(Path(job.folder), lambda: check_folder(job.folder))
        values: Mapping[str, str] = {}
        if job.env_names:
            values = self._folders.ask(Path(job.env_file or "").parent, lambda: secret_values(job))
        try:
            self._folders.ask(run.parent, lambda: attempts.mkdir(parents=True, exist_ok=True))
            # Its number is not used again after a restore of an older database: the scheduler may still have this job.
            (self._state / "jobs" / str(job.id)).mkdir(mode=0o700, parents=True, exist_ok=True)
            code = None
            if job.code:
                code = self._folders.ask(run.parent, lambda: install(self._state / "code" / job.code, run))
        except OSError as error:
            raise error_of(error, f"{error.filename or run}: {error.strerror or error}") from None
        try:
            file = self._job_file(job, claim)
        except NotNow as error:
            raise _Unchecked(str(error)) from None
        return Submission(self._name(attempt), claim, self._service, job, attempt.number, file, seconds, values, code)

    def _seconds_left(self, job: Job) -> float | None:
        if job.time_limit is None:
            return None
        return max(1.0, job.time_limit - sum(one.seconds for one in self._store.attempts(job.id)))

    def _end(self, attempt: ExternalAttempt, seen: Sighting) -> None:
        job = self._known(attempt)
        files = files_of(job, attempt.number)
        # Its storage may have ended it. Other jobs do not wait for that.
        told, last_line = self._folders.ask(Path(job.output_dir), lambda: (files.read_exit(), files.last_line()))
        ended, at_limit = conclude(job, seen, told, last_line)
        # Between two looks it may have begun and ended; one that was cancelled may never have begun.
        ran = told is not None or seen.ended not in (Ended.CANCELLED, Ended.PREEMPTED)
        self._settle(attempt, ended, at_limit, ran)

    def _settle(self, attempt: ExternalAttempt, ended: Exit, at_limit: bool = False, ran: bool = False) -> None:
        with self._store.batch():  # nobody cancels the job between the decision and its end
            job = self._known(attempt)
            if at_limit and job.stopping is None:
                job = self._store.update(job.id, state=State.STOPPING, stopping=Cause.TIME_LIMIT)
            if ran:
                self._store.set_ran(job.id, attempt.number, self._waited.get(job.id, 0.0))
            job = settle(self._store, job, attempt.number, ended, time.time())
        if job.env_names and job.state is not State.QUEUED:
            with suppress(EngineFault):
                self._backends[job.engine].clean(self._claim(job))
        self._to_kill.discard(job.id)
        self._waited.pop(job.id, None)
        self._options.pop(job.id, None)
        self._wake_manager()  # jobs may wait for it

    def _known(self, attempt: ExternalAttempt) -> Job:
        job = self._store.job(attempt.job)
        assert job is not None  # jobs are only forgotten after their end
        return job

    def _claim(self, job: Job) -> str:
        return f"hvd-{self._service}-{job.id}"

    def _name(self, attempt: ExternalAttempt) -> str:
        return f"hvd-{self._service}-{attempt.job}-{attempt.number}"
