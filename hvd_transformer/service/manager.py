"""The service's loop: sees how attempts go, settles those that have ended, schedules, starts and stops.

All state is in the database and the spool folders, so the service may be killed at any moment: the next one adopts the
launchers that run, settles those that have ended, and queues the lost jobs again.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hvd_transformer.errors import WRONG_INPUT, UserError
from hvd_transformer.service.histogram import Histogram
from hvd_transformer.service.jobs import ACTIVE, Attempt, Cause, Host, Job, Placement, State
from hvd_transformer.service.launching.attempts import Change, Launchers, What
from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.launching.launch_command import thread_limit
from hvd_transformer.service.outcome import Exit, outcome
from hvd_transformer.service.scheduling.scheduler import schedule
from hvd_transformer.service.scheduling.snapshot import Decisions, Running, Snapshot
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.user_limits import within_limits

_LOOK_SECONDS = 1.0  # between two looks at time limits and hosts when nothing happens
_ESTIMATE_SECONDS = 10.0  # between two passes of the scheduler when nothing happens: estimates move
_USAGE_SECONDS = 60.0  # after which what a running job uses is written down
_REST = 2.0  # a pass rests for so many times its own duration, so that a long queue leaves time for everything else
_STUCK_SECONDS = 30.0
_LEAST_REST, _MOST_REST = 10.0, 600.0  # seconds, of a job whose hosts are refused again and again

_log = logging.getLogger(__name__)

SecondsLeft = Callable[[Path], float | None]  # of a run directory, from its live speed


class Manager:
    """One thread, from `start` to `close`; jobs go on after `close`.

    `taken`: slots that launches outside the service use; `host_states`: what is known of hosts; `suspect` is told hosts
    that an attempt could not use; `ended` is told each job whose attempt has ended; `disk_bytes`: of the runs of each
    user.
    """

    def __init__(
        self,
        store: Store,
        launchers: Launchers,
        seconds_left: SecondsLeft,
        taken: Callable[[], Sequence[Placement]] = tuple,
        host_states: Callable[[], Mapping[str, HostState]] = dict,
        suspect: Callable[[Mapping[str, str]], object] = lambda hosts: None,
        ended: Callable[[Job], object] = lambda job: None,
        disk_bytes: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._store, self._launchers, self._seconds_left = store, launchers, seconds_left
        self._taken, self._host_states, self._suspect, self._ended = taken, host_states, suspect, ended
        self._disk_bytes = disk_bytes
        self._to_kill: set[int] = set()
        self.pass_seconds = Histogram((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
        self.wait_seconds = Histogram((1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0))
        self._attempts: dict[int, Attempt] = {}  # the open one of each active job
        self._asked: set[tuple[int, int]] = set()  # attempts that were asked to stop
        self._accounted: dict[int, float] = {}  # up to when each job's usage is written down
        self._ends: dict[int, float] = {}  # estimated, of running jobs
        self._promised: Mapping[int, float] = {}  # starts that the scheduler has reserved, for its next pass
        self._refusals: dict[int, tuple[int, float]] = {}  # of jobs whose hosts were refused: how often, rest until
        self._deadlines: dict[int, float] = {}  # of running jobs with a time limit
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
        self._to_kill.add(job)
        self._launchers.wake()

    def problem(self) -> str | None:
        """Why the service does not do its work now, if so."""
        if time.monotonic() - self._looked > _STUCK_SECONDS:
            return f"the manager has done nothing for {time.monotonic() - self._looked:.0f} s"
        return self._failure or None

    def estimated_end(self, id: int) -> float | None:
        """When a running job is likely to end."""
        return self._ends.get(id)

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
        jobs = self._store.jobs(ACTIVE)
        if any(job.id not in self._attempts for job in jobs):  # an error has come between slots and launcher
            for attempt in self._store.open_attempts():
                if attempt.job not in self._attempts:
                    self._take_over(attempt)
            return
        for job in jobs:
            self._account(job, self._attempts[job.id])
            self._stop_if_due(job, self._attempts[job.id])

    def _take_over(self, attempt: Attempt) -> None:
        """Learn what has become of an attempt that somebody else has started, or given slots."""
        job = self._known(attempt.job)
        self._has_begun(job, attempt)
        self._accounted[job.id] = time.time()  # nobody knows up to when it was written down
        if (change := self._launchers.adopt(job, attempt)) is not None:
            self._see(change)

    def _has_begun(self, job: Job, attempt: Attempt) -> None:
        self._attempts[job.id], self._accounted[job.id] = attempt, attempt.began
        if job.time_limit is not None:  # of all attempts together
            earlier = self._store.attempts(job.id)[:-1]
            used = sum(one.ended - one.began for one in earlier if one.ended is not None)
            self._deadlines[job.id] = attempt.began + job.time_limit - used

    def _see(self, change: Change) -> None:
        attempt = self._attempts.get(change.job)
        if attempt is None or attempt.number != change.attempt:
            return
        if change.what is not What.BEGUN:
            self._settle(attempt, change.exit)
        elif (job := self._known(change.job)).state is State.STARTING:
            with suppress(UserError):  # it is being cancelled
                self._store.update(job.id, state=State.RUNNING)
            if attempt.number == 1:
                self.wait_seconds.observe(time.time() - job.submitted)

    def _settle(self, attempt: Attempt, ended: Exit | None) -> None:
        now = time.time()
        with self._store.batch():  # nobody cancels the job between the decision and its end
            job = self._known(attempt.job)
            self._account(job, attempt, at_once=True)
            what = outcome(job, ended)
            job = self._store.end_attempt(
                job.id,
                attempt.number,
                ended=now,
                state=what.state,
                code=ended.code if ended else None,
                cause=ended.cause if ended else what.reason,
                first_step=self._first_step(attempt),
                last_step=ended.step if ended else None,
                reason=what.reason,
                retries=job.retries + 1 if what.retry else None,
            )
        for known in (self._attempts, self._accounted, self._ends, self._deadlines):
            known.pop(job.id, None)
        self._asked.discard((job.id, attempt.number))
        self._to_kill.discard(job.id)
        if what.state is State.QUEUED:  # it keeps its place, ahead of jobs that were promised a start meanwhile
            self._promised = {job.id: math.inf, **self._promised}
        self._note_refusal(job.id, ended is not None and bool(ended.refused))
        if ended and (hosts := {**dict.fromkeys(ended.lost, "it no longer answered"), **ended.refused}):
            self._suspect(hosts)
        self._due.set()
        self._ended(job)

    def _note_refusal(self, job: int, refused: bool) -> None:
        """A job whose hosts are refused starts elsewhere at once, but does not go round in circles."""
        count = self._refusals.get(job, (0, 0.0))[0] + 1
        if refused:
            rest = 0.0 if count == 1 else min(_LEAST_REST * 2.0 ** (count - 2), _MOST_REST)
            self._refusals[job] = count, time.monotonic() + rest
        else:
            self._refusals.pop(job, None)

    def _known(self, id: int) -> Job:
        job = self._store.job(id)
        assert job is not None  # jobs are only forgotten after their end
        return job

    def _first_step(self, attempt: Attempt) -> int:
        """Attempts resume at the last step that the one before has told, or a little earlier."""
        before = [earlier.last_step or 0 for earlier in self._store.attempts(attempt.job)]
        return max(before, default=0)

    def _look_at_hosts(self) -> None:
        states = self._host_states()
        for host in self._store.hosts():
            if (state := states.get(host.name)) is None:
                continue
            if host.down != state.down:
                self._store.set_down(host.name, state.down)
                self._due.set()
            if state.threads not in (0, host.threads):
                self._store.put_hosts([replace(host, threads=state.threads)])

    def _account(self, job: Job, attempt: Attempt, at_once: bool = False) -> None:
        now = time.time()
        seconds = now - self._accounted.get(job.id, attempt.began)
        if seconds > _USAGE_SECONDS or (at_once and seconds > 0):
            self._store.add_usage(job.owner, seconds * _ranks(attempt), now)
            self._accounted[job.id] = now

    def _stop_if_due(self, job: Job, attempt: Attempt) -> None:
        if job.state is State.RUNNING and time.time() > self._deadlines.get(job.id, math.inf):
            job = self._store.update(job.id, state=State.STOPPING, stopping=Cause.TIME_LIMIT)
        if job.state is not State.STOPPING:
            return
        if job.id in self._to_kill:
            self._to_kill.discard(job.id)
            self._launchers.stop(job, attempt, now=True)
        elif (job.id, attempt.number) not in self._asked:
            self._asked.add((job.id, attempt.number))
            self._launchers.stop(job, attempt, now=False)

    def schedule(self) -> None:
        """One pass of the scheduler, and what it decides."""
        began = time.monotonic()
        running = self._running()
        waiting, reasons = within_limits(self._store.waiting(), running, self._store.all_limits(), self._disk_bytes())
        for job, others in self._store.unmet_dependencies().items():
            reasons[job] = in_words(others)
        resting = {job for job, (_, until) in self._refusals.items() if until > began}  # they keep their reasons
        waiting = [job for job in waiting if job.id not in resting]
        now, hosts = time.time(), self._store.hosts()
        usage, taken = self._store.usage(now), tuple(self._taken())
        decisions = schedule(Snapshot(now, hosts, waiting, running, usage, taken, self._promised))
        self._promised = decisions.promised
        self._obey(decisions, hosts)
        self._store.set_waits({**reasons, **decisions.reasons}, decisions.estimated_starts)
        self.pass_seconds.observe(time.monotonic() - began)

    def _running(self) -> list[Running]:
        now, running = time.time(), []
        for job in self._store.jobs(ACTIVE):
            attempt = self._attempts[job.id]
            left = self._seconds_left(Path(job.output_dir)) if job.state is State.RUNNING else None
            limit = self._deadlines.get(job.id)
            ends = [end for end in (None if left is None else now + left, limit) if end is not None]
            self._ends.pop(job.id, None)
            if ends:
                self._ends[job.id] = min(ends)
            running.append(
                Running(
                    job.id,
                    job.owner,
                    job.priority,
                    job.needs,
                    attempt.allocation,
                    attempt.began,
                    self._ends.get(job.id),
                    job.state is State.STOPPING,
                )
            )
        return running

    def _obey(self, decisions: Decisions, hosts: Sequence[Host]) -> None:
        for victim in decisions.preempts:
            with suppress(UserError):  # it has just ended
                self._store.update(victim.victim, state=State.STOPPING, stopping=Cause.PREEMPTED)
        for grow in decisions.grows:
            attempt = self._store.reallocate(grow.job, grow.allocation)
            if attempt is not None and (job := self._store.job(grow.job)) is not None:
                self._attempts[job.id] = attempt
                self._launchers.write_hosts(job, grow.allocation)
        for start in decisions.starts:
            attempt = self._store.start(start.job, start.allocation, time.time())
            if attempt is not None and (job := self._store.job(start.job)) is not None:
                self._has_begun(job, attempt)
                try:
                    self._launchers.start(job, attempt, thread_limit(attempt.allocation, hosts))
                except UserError as error:
                    self._settle(attempt, Exit(WRONG_INPUT, str(error)))
                except BaseException:
                    del self._attempts[job.id]  # `look` finds out whether a launcher runs
                    raise


def in_words(others: Mapping[int, State]) -> str:
    """Why a job waits for others, of which these have not succeeded."""
    words = [
        f"job {job}, which {'was cancelled' if state is State.CANCELLED else 'failed'} (retry it)"
        if state in (State.FAILED, State.CANCELLED)
        else f"job {job}"
        for job, state in sorted(others.items())[:8]
    ]
    return f"waits for {', '.join(words)}{', …' if len(others) > 8 else ''}"


def _ranks(attempt: Attempt) -> int:
    return sum(part.ranks for part in attempt.allocation)
