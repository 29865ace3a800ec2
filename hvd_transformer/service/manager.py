"""The service's loop: sees how attempts go, settles those that have ended, schedules, starts and stops.

All state is in the database and the spool folders, so the service may be killed at any moment: the next one adopts the
launchers that run, settles those that have ended, and queues the lost jobs again.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.histogram import Histogram
from hvd_transformer.service.jobs import ACTIVE, Attempt, Cause, Engine, Host, Job, Placement, State
from hvd_transformer.service.launching.attempts import Change, Launchers
from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.launching.launch_command import thread_limit
from hvd_transformer.service.outcome import Exit
from hvd_transformer.service.run_estimates import RunEstimates
from hvd_transformer.service.runs.pace import Progress
from hvd_transformer.service.scheduling.run_length import median_length
from hvd_transformer.service.scheduling.scheduler import fits, schedule
from hvd_transformer.service.scheduling.snapshot import Decisions, Promise, Running, Snapshot
from hvd_transformer.service.scheduling.wait_reasons import dependencies
from hvd_transformer.service.settlement import settle
from hvd_transformer.service.stops import Stops
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.not_now import rest_seconds
from hvd_transformer.service.user_limits import grown_within_limits, within_limits

_LOOK_SECONDS = 1.0  # between two looks at time limits and hosts when nothing happens
_ESTIMATE_SECONDS = 10.0  # between two passes of the scheduler when nothing happens: estimates move
_USAGE_SECONDS = 60.0  # after which what a running job uses is written down
_REST = 2.0  # a pass rests for so many times its own duration, so that a long queue leaves time for everything else
_STUCK_SECONDS = 30.0

_log = logging.getLogger(__name__)


class Manager:
    """One thread, from `start` to `close`; jobs go on after `close`.

    `progress`: how far the run in a folder is; `taken`: slots that launches outside the service use; `host_states`:
    what is known of hosts; `suspect` is told hosts that an attempt could not use; `disk_bytes`: of the runs of each
    user; `hand_over` gets queued jobs of other schedulers, and need not take all of them.
    """

    def __init__(
        self,
        store: Store,
        launchers: Launchers,
        progress: Callable[[Path], Progress | None],
        taken: Callable[[], Sequence[Placement]] = tuple,
        host_states: Callable[[], Mapping[str, HostState]] = dict,
        suspect: Callable[[Mapping[str, str]], object] = lambda hosts: None,
        disk_bytes: Callable[[], Mapping[str, int] | None] = dict,
        hand_over: Callable[[Sequence[int]], object] = lambda jobs: None,
    ) -> None:
        self._store, self._launchers = store, launchers
        self._taken, self._host_states, self._suspect = taken, host_states, suspect
        self._disk_bytes, self._hand_over = disk_bytes, hand_over
        self._stops, self._estimates = Stops(store, launchers), RunEstimates(store, progress)
        self.pass_seconds = Histogram((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
        self.wait_seconds = Histogram((1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0))
        self._attempts: dict[int, Attempt] = {}  # the open one of each active job
        self._accounted: dict[int, float] = {}  # up to when each job's usage is written down, monotonic
        self._promised: Mapping[int, Promise] = {}  # starts that the scheduler has reserved, for its next pass
        self._refusals: dict[int, tuple[int, float]] = {}  # of jobs that could not start: how often, rest until
        self._refused_elsewhere: deque[int] = deque()  # and that are not counted yet
        self._due = threading.Event()  # a pass of the scheduler
        self._closing = threading.Event()
        self._looked = time.monotonic()
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="manager", daemon=True)

    def start(self) -> None:
        """Begin; `recover` comes first."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._launchers.wake()
        self._thread.join()

    def wake(self) -> None:
        """Tell it that jobs or hosts have changed. From any thread."""
        self._due.set()
        self._launchers.wake()

    def kill(self, job: int) -> None:
        """Kill the ranks of a job that is being stopped, in place of letting them save. From any thread."""
        self._stops.kill(job)

    def refused(self, job: int) -> None:
        """Let a job rest that could not be handed over to its scheduler, and is queued again. From any thread."""
        self._refused_elsewhere.append(job)

    def problem(self) -> str | None:
        """Why the service does not do its work now, if so."""
        if time.monotonic() - self._looked > _STUCK_SECONDS:
            return f"the manager has done nothing for {time.monotonic() - self._looked:.0f} s"
        return self._failure or None

    def estimated_end(self, id: int) -> float | None:
        """When a running job is likely to end."""
        return self._estimates.end(id)

    def _run(self) -> None:
        rest_until = estimate_at = 0.0
        while not self._closing.is_set():
            self._looked = time.monotonic()
            try:
                self.look()
                now = time.monotonic()
                if now >= rest_until and (self._due.is_set() or now >= estimate_at):
                    self._due.clear()
                    self.schedule()
                    took = time.monotonic() - now
                    rest_until, estimate_at = now + (1 + _REST) * took, now + took + _ESTIMATE_SECONDS
                self._failure = ""
            except UserError as error:  # a full disk, for example: nothing has changed, and it is tried again
                self._fail(str(error))
            except Exception as error:
                _log.exception("the manager failed; it goes on")
                self._fail(f"{type(error).__name__}: {error}")
            rest = rest_until - time.monotonic() if self._due.is_set() else _LOOK_SECONDS
            self._launchers.wait(min(max(rest, 0.0), _LOOK_SECONDS))

    def _fail(self, line: str) -> None:
        if line != self._failure:
            _log.error("%s", line)
        self._failure = line
        self._due.set()
        self._closing.wait(_LOOK_SECONDS)

    def recover(self) -> None:
        """Take over the attempts that an earlier service has left."""
        for attempt in self._store.open_attempts():
            self._take_over(attempt)
        self._due.set()

    def look(self) -> None:
        """Settle what has happened to attempts and hosts, and stop what is to be stopped."""
        for change in self._launchers.poll():
            self._see(change)
        self._look_at_hosts()
        jobs = self._store.jobs(ACTIVE, engine=Engine.HOSTS)
        if any(job.id not in self._attempts for job in jobs):  # an error has come between slots and launcher
            for attempt in self._store.open_attempts():
                if attempt.job not in self._attempts:
                    self._take_over(attempt)
            return
        for job in jobs:
            self._account(job, self._attempts[job.id])
            self._stops.look(job, self._attempts[job.id])

    def _take_over(self, attempt: Attempt) -> None:
        """Learn what has become of an attempt that somebody else has started, or given slots."""
        job = self._known(attempt.job)
        try:
            self._has_begun(job, attempt)
            if (ended := self._launchers.adopt(job, attempt)) is not None:
                self._settle(attempt, ended)
        except BaseException:
            self._attempts.pop(job.id, None)  # `look` takes it over
            raise

    def _has_begun(self, job: Job, attempt: Attempt) -> None:
        # Monotonic: a clock that is set charges nobody. Of an adopted one, nobody knows up to when it was written down.
        self._attempts[job.id], self._accounted[job.id] = attempt, time.monotonic()
        self._stops.began(job, attempt)

    def _see(self, change: Change) -> None:
        attempt = self._attempts.get(change.job)
        if attempt is None or attempt.number != change.attempt:
            return
        if change.exit is not None:
            self._settle(attempt, change.exit)
            return
        with self._store.batch():  # nobody cancels the job in between
            if (job := self._known(change.job)).state is not State.STARTING:
                return
            self._store.update(job.id, state=State.RUNNING)
        if attempt.number == 1:
            self.wait_seconds.observe(time.time() - job.submitted)

    def _settle(self, attempt: Attempt, ended: Exit) -> None:
        with self._store.batch():  # nobody cancels the job between the decision and its end
            job = self._known(attempt.job)
            self._account(job, attempt, at_once=True)
            job = settle(self._store, job, attempt.number, ended, time.time())
        for known in (self._attempts, self._accounted):
            known.pop(job.id, None)
        self._stops.ended(job.id)
        self._estimates.ended(job.id)
        if job.state is State.QUEUED:  # it keeps its place, ahead of jobs that were promised a start meanwhile
            self._promised = {job.id: Promise(), **self._promised}
        terminated = ended.stopped not in (None, "request")
        self._note_refusal(job.id, bool(ended.refused) or not ended.started or terminated)
        if hosts := {**dict.fromkeys(ended.lost, "it no longer answered"), **ended.refused}:
            self._suspect(hosts)
        self._due.set()

    def _note_refusal(self, job: int, refused: bool, at_once: bool = True) -> None:
        """A job that could not be started, or that somebody else has ended, is tried again at once, elsewhere, but does
        not go round in circles. Without `at_once` it rests first.
        """
        count = self._refusals.get(job, (0, 0.0))[0] + 1
        if refused:
            tries = count - at_once
            rest = rest_seconds(tries) if tries else 0.0
            self._refusals[job] = count, time.monotonic() + rest
        else:
            self._refusals.pop(job, None)

    def _still_refused(self, now: float) -> dict[int, str]:
        """Let the jobs rest on that cannot start yet; returns why.

        They get no slots, and take none from others, to find that out.
        """
        still: dict[int, str] = {}
        asked: dict[tuple[object, ...], str | None] = {}  # of thousands of jobs most need the same
        for id in [id for id, (_, until) in self._refusals.items() if 0.0 < until <= now and id not in self._attempts]:
            job = self._known(id)
            needs = job.folder, job.env_file, Path(job.output_dir).parent
            if needs not in asked:
                asked[needs] = self._launchers.why_not_now(job)
            if (why := asked[needs]) is not None:
                self._note_refusal(id, True)
                still[id] = why
            else:
                self._refusals[id] = self._refusals[id][0], 0.0  # asked again if its start is refused again
        return still

    def _forget_refusals(self, queued: Iterable[int]) -> None:
        """Drop the counts of jobs that have left the queue."""
        known = self._attempts.keys() | set(queued)
        self._refusals = {job: refusal for job, refusal in self._refusals.items() if job in known}

    def _not_submitted(self) -> list[int]:
        """The jobs that are handed over, but that their schedulers do not have yet: they may be refused again."""
        if not (self._refusals or self._refused_elsewhere):
            return []
        return [attempt.job for attempt in self._store.external_attempts() if attempt.external is None]

    def _known(self, id: int) -> Job:
        job = self._store.job(id)
        assert job is not None  # jobs are only forgotten after their end
        return job

    def _look_at_hosts(self) -> None:
        states = self._host_states()
        for host in self._store.hosts():
            if (state := states.get(host.name)) is None:
                continue
            if host.down != state.down:
                self._store.set_down(host.name, state.down)
                self._due.set()
            if state.threads not in (0, host.threads):
                self._store.set_threads(host.name, state.threads)

    def _account(self, job: Job, attempt: Attempt, at_once: bool = False) -> None:
        now = time.monotonic()
        seconds = now - self._accounted[job.id]
        if seconds > _USAGE_SECONDS or at_once:
            self._store.add_usage(job.owner, seconds * _ranks(attempt), time.time())
            self._accounted[job.id] = now

    def schedule(self) -> None:
        """One pass of the scheduler, and what it decides."""
        began = time.monotonic()
        running = self._running()
        limits, elsewhere = self._store.all_limits(), self._store.external_owners()
        not_submitted = self._not_submitted()  # before the queue is read, to which they may return
        now, hosts, queued = time.time(), self._store.hosts(), self._store.waiting()
        while self._refused_elsewhere:
            self._note_refusal(self._refused_elsewhere.popleft(), True, at_once=False)
        self._forget_refusals([*not_submitted, *(job.id for job in queued)])
        still = self._still_refused(began)
        resting = {job for job, (_, until) in self._refusals.items() if until > began}  # they keep their reasons
        could_run = fits([host for host in hosts if not (host.down or host.drained)])
        waiting, reasons = within_limits(
            [job for job in queued if job.id not in resting],
            running,
            limits,
            self._disk_bytes(),
            elsewhere,
            lambda job: job.engine is not Engine.HOSTS or could_run(job.needs),
        )
        reasons |= still
        for job, others in self._store.unmet_dependencies().items():
            reasons[job] = dependencies(others)
        if external := [job.id for job in waiting if job.engine is not Engine.HOSTS]:
            self._hand_over(external)
        waiting = [job for job in waiting if job.engine is Engine.HOSTS]
        running = grown_within_limits(running, (job for job in waiting if could_run(job.needs)), limits)
        usage, taken = self._store.usage(now), tuple(self._taken())
        median = median_length(self._store.recent_seconds())
        decisions = schedule(Snapshot(now, hosts, waiting, running, usage, taken, self._promised, median))
        self._promised = decisions.promised
        self._obey(decisions, hosts, {job.id: job.seconds for job in waiting})
        self._store.set_waits({**reasons, **decisions.reasons}, decisions.estimated_starts)
        self.pass_seconds.observe(time.monotonic() - began)

    def _running(self) -> list[Running]:
        now, running = time.time(), []
        for job in self._store.jobs(ACTIVE, engine=Engine.HOSTS):
            attempt = self._attempts[job.id]
            running.append(
                Running(
                    job.id,
                    job.owner,
                    job.priority,
                    job.needs,
                    attempt.allocation,
                    attempt.began,
                    self._estimates.look(job, attempt, self._stops.deadline(job.id), now),
                    job.state is State.STOPPING,
                )
            )
        return running

    def _obey(self, decisions: Decisions, hosts: Sequence[Host], seconds: Mapping[int, float | None]) -> None:
        for victim in decisions.preempts:
            with suppress(UserError):  # it has just ended
                self._store.update(victim.victim, state=State.STOPPING, stopping=Cause.PREEMPTED)
        for grow in decisions.grows:
            before, attempt = self._attempts[grow.job], self._store.reallocate(grow.job, grow.allocation)
            if attempt is not None and (job := self._store.job(grow.job)) is not None:
                try:
                    self._launchers.write_hosts(job, grow.allocation)
                except OSError:
                    self._store.reallocate(job.id, before.allocation)
                    raise
                self._attempts[job.id] = attempt
        for start in decisions.starts:
            attempt = self._store.start(start.job, start.allocation, time.time())
            if attempt is not None and (job := self._store.job(start.job)) is not None:
                try:
                    self._has_begun(job, attempt)
                    self._estimates.began(attempt, seconds.get(job.id))
                    environment = thread_limit(attempt.allocation, hosts)
                    if (ended := self._launchers.start(job, attempt, environment)) is not None:
                        self._settle(attempt, ended)
                except BaseException:
                    self._attempts.pop(job.id, None)  # `look` finds out whether a launcher runs
                    raise


def _ranks(attempt: Attempt) -> int:
    return sum(part.ranks for part in attempt.allocation)
