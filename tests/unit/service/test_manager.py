"""The manager's loop, with a real database and scheduler, and launchers that do what the test says."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.actions import Actions
from hvd_transformer.service.jobs import Allocation, Attempt, Cause, Engine, Host, Job, Needs, Placement, State
from hvd_transformer.service.launching.attempts import Change
from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.manager import Manager
from hvd_transformer.service.outcome import Exit, not_started
from hvd_transformer.service.runs.pace import Progress
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.store import NewJob, Store
from hvd_transformer.service.submitting.checker import Checker


class FakeLaunchers:
    """Attempts that begin and end when the test says so."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int, Allocation]] = []
        self.environments: list[Mapping[str, str]] = []
        self.stopped: list[tuple[int, int, bool]] = []
        self.grown: list[tuple[int, Allocation]] = []
        self.adopted: list[int] = []
        self.changes: list[Change] = []
        self.adopting: dict[int, Exit] = {}
        self.refuse: Exit | None = None
        self.away: str | None = None
        self.looked_for: list[int] = []
        self.broken = False

    def start(self, job: Job, attempt: Attempt, environment: Mapping[str, str]) -> Exit | None:
        if self.broken:
            self.broken = False
            raise RuntimeError("an error nobody thought of")
        if self.refuse is not None:
            return self.refuse
        if self.away is not None:
            return not_started(self.away)
        self.started.append((job.id, attempt.number, attempt.allocation))
        self.environments.append(environment)
        return None

    def why_not_now(self, job: Job) -> str | None:
        self.looked_for.append(job.id)
        return None if self.away is None else not_started(self.away).cause

    def adopt(self, job: Job, attempt: Attempt) -> Exit | None:
        self.adopted.append(job.id)
        return self.adopting.get(job.id)

    def poll(self) -> list[Change]:
        changes, self.changes = self.changes, []
        return changes

    def stop(self, job: Job, attempt: Attempt, now: bool) -> None:
        self.stopped.append((job.id, attempt.number, now))

    def write_hosts(self, job: Job, allocation: Allocation) -> None:
        self.grown.append((job.id, allocation))

    def wake(self) -> None:
        """Nobody waits."""

    def begin(self, job: int, number: int = 1) -> None:
        self.changes.append(Change(job, number))

    def end(self, job: int, code: int | None, number: int = 1, **how: object) -> None:
        self.changes.append(Change(job, number, Exit(code, **how)))  # type: ignore[arg-type]


class Service:
    """A manager and all that is around it."""

    def __init__(self, folder: Path) -> None:
        self.store, self.launchers = Store(folder / "service.db"), FakeLaunchers()
        self.states: dict[str, HostState] = {}
        self.suspected: list[Mapping[str, str]] = []
        self.handed_over: list[Sequence[int]] = []
        self.progress: dict[Path, Progress] = {}
        self.manager = self.new_manager()
        checker = Checker(folder / "code")
        self.actions = Actions(self.store, checker, folder / "runs", lambda: None, self.manager.kill)
        self.folder = folder

    def new_manager(self) -> Manager:
        return Manager(
            self.store,
            self.launchers,  # type: ignore[arg-type]
            self.progress.get,
            host_states=lambda: self.states,
            suspect=self.suspected.append,
            hand_over=self.handed_over.append,
        )

    def add(self, ranks: int = 1, owner: str = "ann", **fields: object) -> int:
        needs = Needs(ranks, fields.pop("min_ranks", ranks))  # type: ignore[arg-type]
        job = NewJob("job", owner, time.time(), needs, str(self.folder / "runs" / "{id}"), "/", (), **fields)  # type: ignore[arg-type]
        return self.store.add_jobs([job])[0]

    def turn(self) -> None:
        self.manager.look()
        self.manager.schedule()
        self.manager.look()

    def state(self, job: int) -> State:
        found = self.store.job(job)
        assert found is not None
        return found.state

    def job(self, job: int) -> Job:
        found = self.store.job(job)
        assert found is not None
        return found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    with closing(made.store):
        made.store.put_hosts([Host("h1", 2, threads=3), Host("h2", 2, threads=2)])
        yield made


def test_a_job_runs_to_its_end(service: Service) -> None:
    job = service.add(4)
    service.turn()
    assert service.state(job) is State.STARTING
    assert service.launchers.environments == [{"OMP_NUM_THREADS": "2"}]
    service.launchers.begin(job)
    service.turn()
    assert service.state(job) is State.RUNNING
    service.launchers.end(job, 0, step=40)
    service.turn()
    assert service.state(job) is State.SUCCEEDED
    (attempt,) = service.store.attempts(job)
    assert (attempt.code, attempt.first_step, attempt.last_step) == (0, 0, 40)


def test_a_job_that_ends_between_two_looks_has_begun_and_ended(service: Service) -> None:
    job = service.add()
    service.turn()
    service.launchers.begin(job)
    service.launchers.end(job, 1, cause="rank 0 failed first")
    service.turn()
    assert (service.state(job), service.job(job).reason) == (State.FAILED, "rank 0 failed first")


def test_all_slots_are_given_once_and_the_next_job_starts_as_they_are_free(service: Service) -> None:
    jobs = [service.add(2), service.add(2), service.add(3)]
    service.turn()
    assert [service.state(job) for job in jobs] == [State.STARTING, State.STARTING, State.QUEUED]
    assert service.job(jobs[2]).reason.startswith("resources: ")
    for job in jobs[:2]:
        service.launchers.end(job, 0)
    service.turn()
    assert service.state(jobs[2]) is State.STARTING


def test_each_end_is_news_also_of_a_job_that_only_waited(service: Service) -> None:
    service.store.keeps_news = True
    waiting, running = service.add(held=True), service.add()
    service.turn()
    service.actions.cancel(waiting)
    assert [(news.job, news.state) for news in service.store.news()] == [(waiting, State.CANCELLED)]
    service.actions.cancel(running)  # it saves first
    assert len(service.store.news()) == 1
    service.launchers.end(running, 1)
    service.turn()
    assert [(news.job, news.reason) for news in service.store.news()][1:] == [(running, "cancelled")]
    for action in (service.actions.cancel, service.actions.hold):
        with pytest.raises(UserError, match=f"^job {waiting} has ended: CANCELLED$"):
            action(waiting)


def test_a_cancelled_job_is_asked_once_and_killed_on_demand(service: Service) -> None:
    job = service.add()
    service.turn()
    service.actions.cancel(job)
    service.turn()
    service.turn()
    assert service.launchers.stopped == [(job, 1, False)]
    service.actions.cancel(job, now=True)
    service.turn()
    assert service.launchers.stopped[1:] == [(job, 1, True)]
    service.launchers.end(job, 1)
    service.turn()
    assert service.state(job) is State.CANCELLED
    assert service.job(service.actions.retry(job).id).state is State.QUEUED


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_that_hvd_transformer_stop_has_ended_is_cancelled(service: Service, begun: bool) -> None:
    stopped, waits = service.add(4), service.add(4)
    service.turn()
    if begun:
        service.launchers.begin(stopped)
        service.turn()
    service.launchers.end(stopped, 1, cause="it was asked to stop", step=7, stopped="request")
    service.turn()
    assert service.state(stopped) is State.CANCELLED
    assert service.job(stopped).reason == "stopped with hvd-transformer stop"
    assert service.state(waits) is State.STARTING


@pytest.mark.parametrize(
    ("stopping", "cause"),
    [
        (Cause.HELD, "held"),
        (Cause.PREEMPTED, "preempted"),
        (Cause.KILLED, "cancelled without saving"),
        (None, "stopped with hvd-transformer stop"),
    ],
)
def test_what_an_attempt_was_stopped_for_is_told(service: Service, stopping: Cause | None, cause: str) -> None:
    job = service.add()
    service.turn()
    service.launchers.begin(job)
    service.turn()
    if stopping is not None:
        service.store.update(job, state=State.STOPPING, stopping=stopping)
    service.launchers.end(job, 1, cause="it was asked to stop", stopped="request")
    service.turn()
    assert service.store.attempts(job)[0].cause == cause


def test_a_job_that_is_to_be_killed_is_killed_by_the_next_service(service: Service) -> None:
    job = service.add()
    service.turn()
    service.actions.cancel(job, now=True)  # and the service is killed before it does so
    service.manager = service.new_manager()
    service.manager.recover()
    service.turn()
    service.turn()
    assert service.launchers.stopped == [(job, 1, True)]
    service.launchers.end(job, 1)
    service.turn()
    assert (service.state(job), service.job(job).reason) == (State.CANCELLED, "cancelled without saving")


def test_a_job_whose_launcher_is_terminated_again_and_again_rests_in_between(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = a_clock(monkeypatch)
    job = service.add(max_retries=0)
    service.turn()
    for number in (1, 2):  # at once the first time
        service.launchers.begin(job, number)
        service.launchers.end(job, 1, number, stopped="SIGTERM")
        service.turn()
    assert (service.state(job), service.job(job).reason) == (State.QUEUED, "its launcher got SIGTERM")
    assert len(service.launchers.started) == 2
    clock[0] += 11
    service.turn()
    assert len(service.launchers.started) == 3


def test_a_higher_priority_preempts_and_the_victim_keeps_its_place(service: Service) -> None:
    victim, other = service.add(4), service.add(4)
    service.turn()
    service.launchers.begin(victim)
    service.turn()
    urgent = service.add(4, owner="ben", priority=10)
    service.turn()
    assert (service.state(victim), service.job(victim).stopping) == (State.STOPPING, Cause.PREEMPTED)
    service.launchers.end(victim, 1, step=7)
    service.turn()
    assert (service.state(urgent), service.state(victim), service.state(other)) == (
        State.STARTING, State.QUEUED, State.QUEUED,
    )  # fmt: skip
    service.launchers.end(urgent, 0)
    service.turn()
    assert service.state(victim) is State.STARTING
    assert [attempt.first_step for attempt in service.store.attempts(victim)] == [0, None]
    assert service.state(other) is State.QUEUED


def test_a_held_job_waits_until_it_is_released(service: Service) -> None:
    job = service.add()
    service.actions.hold(job)
    service.turn()
    assert service.state(job) is State.HELD
    service.actions.release(job)
    service.turn()
    service.actions.hold(job)
    service.turn()
    service.launchers.end(job, 1)
    service.turn()
    assert service.state(job) is State.HELD


def a_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to go on as the test says."""
    clock, start = [time.time()], time.time() - time.monotonic()
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "monotonic", lambda: clock[0] - start)
    return clock


def test_a_clock_that_is_set_ends_no_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.add(time_limit=100.0)
    service.turn()
    service.launchers.begin(job)
    service.turn()
    now = time.time() + 86_400.0
    monkeypatch.setattr(time, "time", lambda: now)
    service.turn()
    assert service.state(job) is State.RUNNING


@pytest.mark.parametrize("jump", [365 * 86_400.0, -365 * 86_400.0])
def test_a_clock_that_is_set_charges_nobody(service: Service, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    clock = a_clock(monkeypatch)
    service.add(ranks=2)
    service.turn()
    monkeypatch.setattr(time, "time", lambda: clock[0] + jump)
    clock[0] += 100
    service.turn()
    assert service.store.usage(time.time())["ann"] == pytest.approx(200)


def test_a_clock_that_was_set_back_lengthens_no_time_limit(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.add(time_limit=100.0)
    service.turn()
    service.launchers.begin(job)
    service.turn()
    clock = a_clock(monkeypatch)
    past = time.time() - 86_400.0
    monkeypatch.setattr(time, "time", lambda: past)
    service.launchers.end(job, 75)
    service.turn()
    manager = service.manager = service.new_manager()
    manager.recover()
    service.launchers.begin(job, 2)
    service.turn()
    clock[0] += 101
    service.turn()
    assert service.launchers.stopped == [(job, 2, False)]


def test_a_time_limit_counts_all_attempts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = a_clock(monkeypatch)
    job = service.add(time_limit=100.0)
    service.turn()
    service.launchers.begin(job)
    clock[0] += 60
    service.turn()
    service.launchers.end(job, 75, cause="it stalled")
    service.turn()
    service.launchers.begin(job, 2)
    clock[0] += 39
    service.turn()
    assert service.state(job) is State.RUNNING
    clock[0] += 2
    service.turn()
    assert service.launchers.stopped == [(job, 2, False)]
    service.launchers.end(job, 1, 2)
    service.turn()
    assert (service.state(job), service.job(job).reason) == (State.FAILED, "reached its time limit of 100 s")


def test_a_lost_host_is_suspected_and_the_job_starts_again_elsewhere(service: Service) -> None:
    job = service.add(2)
    service.turn()
    lost = service.launchers.started[0][2][0].host
    service.launchers.begin(job)
    service.launchers.end(job, 1, cause="host lost", lost=[lost])
    service.states[lost] = HostState("it no longer answered")
    service.turn()
    assert service.suspected == [{lost: "it no longer answered"}]
    assert service.launchers.started[1][2][0].host != lost
    assert service.job(job).retries == 1


def test_dependencies(service: Service) -> None:
    first = service.add()
    second = service.add(after=(first,))
    service.turn()
    assert service.job(second).reason == f"waits for job {first}"
    service.launchers.end(first, 1)
    service.turn()
    assert service.job(second).reason == f"waits for job {first}, which failed (retry it)"
    service.actions.retry(first)
    service.turn()
    service.launchers.end(first, 0, 2)
    service.turn()
    assert service.state(second) is State.STARTING


def test_limits_of_users_are_told_as_reasons(service: Service) -> None:
    service.store.set_limits(Limits(max_running=1))
    first, second = service.add(), service.add()
    service.turn()
    assert (service.state(first), service.state(second)) == (State.STARTING, State.QUEUED)
    assert service.job(second).reason.startswith("limit of ann: ")


def test_what_cannot_be_started_fails_with_its_reason(service: Service) -> None:
    job = service.add()
    service.launchers.refuse = Exit(2, "/gone: no such folder")
    service.turn()
    assert (service.state(job), service.job(job).reason) == (State.FAILED, "/gone: no such folder")


def test_what_this_machine_cannot_start_now_waits_and_does_not_go_round_in_circles(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    job = service.add()
    service.launchers.refuse = not_started("/spool/1: No space left on device")
    for _ in range(5):
        service.turn()
    assert (service.state(job), service.job(job).reason) == (
        State.QUEUED,
        "not started: /spool/1: No space left on device",
    )
    assert (len(service.store.attempts(job)), service.job(job).retries) == (2, 0)


def test_jobs_wait_for_a_folder_that_is_away_without_slots(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take none from others to find out that it is still away."""
    clock = a_clock(monkeypatch)
    jobs = [service.add(2, priority=5), service.add(2, priority=5)]
    service.launchers.away = "/project: No such file or directory"
    for _ in range(5):
        service.turn()
    other = service.add(4)
    service.launchers.away, away = None, service.launchers.away
    service.turn()
    service.launchers.begin(other)
    service.launchers.away = away
    for _ in range(3):
        clock[0] += 1000
        service.turn()
    assert service.state(other) is State.RUNNING
    for job in jobs:
        assert (service.state(job), service.job(job).reason) == (State.QUEUED, f"not started: {away}")
        assert (len(service.store.attempts(job)), service.job(job).retries) == (1, 0)
    assert service.launchers.looked_for == [jobs[0]] * 4  # one look for all that need the same
    service.launchers.away = None
    clock[0] += 1000
    service.turn()
    assert service.state(other) is State.STOPPING
    service.launchers.end(other, 1)
    service.turn()
    assert [service.state(job) for job in jobs] == [State.STARTING] * 2


def test_a_full_disk_in_the_middle_of_a_start_loses_no_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are given; nothing was started, and that cannot be written down either."""
    job = service.add()
    service.launchers.refuse = not_started("/spool/1: No space left on device")
    service.launchers.adopting = {job: not_started("the service ended")}
    end_attempt = service.store.end_attempt
    full = UserError("service.db: the disk is full")
    monkeypatch.setattr(service.store, "end_attempt", lambda *_, **__: (_ for _ in ()).throw(full))
    for turn in (service.manager.schedule, service.manager.look, service.manager.look):
        with pytest.raises(UserError, match="the disk is full"):
            turn()
    assert service.state(job) is State.STARTING
    monkeypatch.setattr(service.store, "end_attempt", end_attempt)
    service.launchers.refuse = None
    service.turn()
    assert service.launchers.started[-1][0] == job
    assert [attempt.number for attempt in service.store.attempts(job)] == [1, 2]


def test_that_ranks_run_is_written_down_once_the_disk_has_room(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = service.add()
    service.turn()
    service.launchers.begin(job)
    (change,) = service.launchers.changes
    update = service.store.update
    full = UserError("service.db: the disk is full")
    monkeypatch.setattr(service.store, "update", lambda *_, **__: (_ for _ in ()).throw(full))
    with pytest.raises(UserError, match="the disk is full"):
        service.manager.look()
    monkeypatch.setattr(service.store, "update", update)
    service.launchers.changes.append(change)  # as it was not settled
    service.turn()
    assert service.state(job) is State.RUNNING


def test_an_elastic_job_whose_launcher_cannot_be_told_does_not_grow(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, elastic = service.add(2), service.add(4, min_ranks=2)
    service.turn()
    service.launchers.begin(elastic)
    service.launchers.end(first, 0)
    monkeypatch.setattr(service.launchers, "write_hosts", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    service.manager.look()
    with pytest.raises(OSError, match="full"):
        service.manager.schedule()
    small = service.add(2)  # may have the slots
    monkeypatch.undo()
    service.turn()
    assert service.state(small) is State.STARTING


def test_an_elastic_job_grows(service: Service) -> None:
    first, elastic = service.add(2), service.add(4, min_ranks=2)
    service.turn()
    assert [sum(part.ranks for part in given) for *_, given in service.launchers.started] == [2, 2]
    service.launchers.begin(elastic)
    service.launchers.end(first, 0)
    service.turn()
    ((job, grown),) = service.launchers.grown
    assert (job, sum(part.ranks for part in grown)) == (elastic, 4)
    assert service.store.open_attempts()[0].allocation == grown


def test_an_elastic_job_does_not_grow_beyond_the_slots_of_its_owner(service: Service) -> None:
    service.store.put_hosts([Host("h1", 4, threads=3), Host("h2", 4, threads=2)])
    service.store.set_limits(Limits(max_slots=5), "ann")
    other, elastic = service.add(6, "ben", priority=1), service.add(5, min_ranks=2)
    service.turn()
    small = service.add(1)
    service.turn()
    assert [service.state(job) for job in (other, elastic)] == [State.STARTING, State.STARTING]
    service.launchers.begin(elastic)
    service.launchers.end(other, 0)
    service.turn()
    service.turn()
    assert service.state(small) is State.STARTING
    (grown,) = service.launchers.grown
    assert sum(part.ranks for part in grown[1]) == 4


def test_an_elastic_job_starts_with_as_many_ranks_as_the_limit_of_its_owner_leaves(service: Service) -> None:
    service.store.set_limits(Limits(max_slots=3))
    fixed, elastic = service.add(1), service.add(4, min_ranks=1)
    service.turn()
    sizes = [sum(part.ranks for part in allocation) for *_, allocation in service.launchers.started]
    assert ([job for job, *_ in service.launchers.started], sizes) == ([fixed, elastic], [1, 2])
    too_large = service.add(4, owner="ben", min_ranks=2)
    service.store.set_limits(Limits(max_slots=1), "ben")
    service.turn()
    assert service.job(too_large).reason == ("limit of ben: 0 slots in use, 1 may be; this job needs at least 2")


def test_what_an_admin_does_with_hosts_while_the_manager_looks_at_them_stays(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = service.store.hosts()
    service.actions.add_hosts("h1:8", {})
    service.actions.remove_host("h2")
    monkeypatch.setattr(service.store, "hosts", lambda: before)
    service.states = {name: HostState(threads=7, down="no answer") for name in ("h1", "h2")}
    service.manager.look()
    monkeypatch.undo()
    assert service.store.hosts() == [Host("h1", 8, threads=7, down="no answer")]


def test_gpus_stay_until_an_admin_takes_them_away(service: Service) -> None:
    service.actions.add_hosts("h1:2,h2:2", {"h1": [0, 1]})
    service.actions.add_hosts("h1:4", {})
    assert service.store.hosts()[0] == Host("h1", 4, (0, 1))
    service.actions.add_hosts("h1:4,h2:2", {"h1": []})
    assert [host.gpus for host in service.store.hosts()] == [(), ()]


def _meanwhile(service: Service, monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> threading.Thread:
    """Another thread tries to do `what` between the look of an action at its job and its change."""
    known, other = service.actions._known, threading.Thread(target=what)

    def look(id: int) -> Job:
        found = known(id)
        if threading.current_thread() is threading.main_thread():
            other.start()
            other.join(0.3)
        return found

    monkeypatch.setattr(service.actions, "_known", look)
    return other


def test_a_cancel_during_a_release_is_not_undone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.add(held=True)
    other = _meanwhile(service, monkeypatch, lambda: service.actions.cancel(job))
    service.actions.release(job)
    other.join()
    assert service.state(job) is State.CANCELLED


def test_two_retries_at_the_same_time_are_one(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.add()
    service.actions.cancel(job)

    def retry() -> None:
        with suppress(UserError):  # it is queued
            service.actions.retry(job)
        service.manager.schedule()

    other = _meanwhile(service, monkeypatch, retry)
    service.actions.retry(job)
    other.join()
    assert service.state(job) is State.STARTING


def test_a_new_manager_adopts_settles_and_queues_again(service: Service) -> None:
    alive, ended, unstarted = (service.add(1) for _ in range(3))
    service.turn()
    for job in (alive, ended):
        service.launchers.begin(job)
    service.turn()
    service.launchers.adopting = {
        ended: Exit(0, step=9),
        unstarted: not_started("the service ended"),
    }
    service.manager = service.new_manager()
    service.manager.recover()
    assert sorted(service.launchers.adopted) == [alive, ended, unstarted]
    states = [service.state(job) for job in (alive, ended, unstarted)]
    assert states == [State.RUNNING, State.SUCCEEDED, State.QUEUED]
    service.turn()
    assert [attempt.number for attempt in service.store.attempts(unstarted)] == [1, 2]
    assert len(service.launchers.started) == 4


def test_ends_are_estimated_from_what_is_left(service: Service) -> None:
    job = service.add(4, time_limit=1000.0)
    later = service.add(4)
    service.turn()
    service.launchers.begin(job)
    service.progress[Path(service.job(job).output_dir)] = Progress(10, 20, 50.0, 5.0)
    service.turn()
    now = time.time()
    assert service.manager.estimated_end(job) == pytest.approx(now + 50, abs=20)
    assert service.job(later).estimated_start == pytest.approx(now + 50, abs=20)


def test_a_job_whose_hosts_are_refused_again_and_again_rests_in_between(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    job = service.add()
    service.turn()
    for number in (1, 2):  # at once the first time
        service.launchers.end(job, 2, number, cause="x", refused={"h1": "host h1: has no data"})
        service.turn()
    assert (len(service.launchers.started), service.state(job)) == (2, State.QUEUED)
    assert service.job(job).reason == "not started: host h1: has no data"
    clock[0] += 11
    service.turn()
    assert len(service.launchers.started) == 3


def test_a_cancel_as_the_job_ends_is_not_lost(service: Service) -> None:
    job = service.add()
    service.turn()
    service.launchers.end(job, 75, cause="it stalled")
    service.actions.cancel(job)
    service.turn()
    assert service.state(job) is State.CANCELLED


@pytest.mark.parametrize(("action", "state"), [("cancel", State.CANCELLED), ("hold", State.HELD)])
def test_a_job_does_not_start_between_the_decision_to_keep_it_and_its_end(
    service: Service, monkeypatch: pytest.MonkeyPatch, action: str, state: State
) -> None:
    job, started, read = service.add(), list[Attempt | None](), service.store.job
    where = (Placement("h1", 1),)
    thread = threading.Thread(target=lambda: started.append(service.store.start(job, where, 1.0)))

    def read_as_it_starts(id: int) -> Job | None:
        found = read(id)
        thread.start()
        thread.join(0.3)  # long enough for one that nothing keeps waiting
        return found

    monkeypatch.setattr(service.store, "job", read_as_it_starts)
    assert getattr(service.actions, action)(job).state is state
    thread.join()
    assert started == [None]


def test_a_job_that_used_up_its_time_is_not_retried(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = a_clock(monkeypatch)
    job = service.add(time_limit=10.0)
    service.turn()
    service.launchers.begin(job)
    clock[0] += 11
    service.turn()
    service.launchers.end(job, 1)
    service.turn()
    with pytest.raises(UserError, match="used up its time limit"):
        service.actions.retry(job)


def test_an_error_between_slots_and_launcher_loses_no_job(service: Service) -> None:
    job = service.add()
    service.launchers.broken = True
    service.launchers.adopting = {job: not_started("the service ended")}
    with pytest.raises(RuntimeError):
        service.manager.schedule()
    service.turn()
    assert [attempt.number for attempt in service.store.attempts(job)] == [1, 2]
    assert [started[:2] for started in service.launchers.started] == [(job, 2)]


@pytest.mark.parametrize("part", ["_stops", "_estimates"])
def test_an_error_just_after_slots_were_given_loses_no_job(
    service: Service, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """As when a database cannot be read for a moment: too many files are open."""
    job = service.add(time_limit=100.0)
    fault = UserError("service.db: it cannot be opened")
    monkeypatch.setattr(getattr(service.manager, part), "began", lambda *_: (_ for _ in ()).throw(fault))
    service.launchers.adopting = {job: not_started("the service ended")}
    with pytest.raises(UserError, match="it cannot be opened"):
        service.manager.schedule()
    assert service.state(job) is State.STARTING
    monkeypatch.undo()
    service.turn()
    assert service.launchers.started == [(job, 2, service.store.attempts(job)[1].allocation)]


def test_an_error_as_an_attempt_is_taken_over_loses_no_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.add(time_limit=100.0)
    service.turn()
    service.manager = service.new_manager()
    fault = UserError("service.db: it cannot be opened")
    monkeypatch.setattr(service.manager._stops, "began", lambda *_: (_ for _ in ()).throw(fault))
    with pytest.raises(UserError, match="it cannot be opened"):
        service.manager.recover()
    monkeypatch.undo()
    service.turn()
    assert service.launchers.adopted == [job]


def test_jobs_of_one_kind_are_as_long_as_the_one_whose_speed_is_known(service: Service) -> None:
    """The job that needs all slots waits for 100 s; only jobs that end by then start before."""
    config = {"training.max_steps": 100}
    first = service.add(2, config=config)
    service.turn()
    service.launchers.begin(first)
    service.progress[Path(service.job(first).output_dir)] = Progress(0, 100, 100.0, 1.0)
    everything = service.add(4)
    short, long = (service.add(config={"training.max_steps": steps, "seed": 2}) for steps in (50, 200))
    other = service.add(config={"training.max_steps": 50, "model.num_layers": 9})
    service.turn()
    service.turn()
    assert service.state(short) is State.STARTING
    assert {service.state(job) for job in (everything, long, other)} == {State.QUEUED}
    assert service.manager.estimated_end(short) == pytest.approx(time.time() + 50, abs=20)


def test_jobs_of_other_schedulers_are_handed_over_and_left_alone(service: Service) -> None:
    """They take no slots: the job behind them starts."""
    external = service.add(ranks=4, engine=Engine.SLURM)
    later = service.add(ranks=4, engine=Engine.SLURM, after=(external,))
    own = service.add(ranks=4)
    service.turn()
    assert service.handed_over == [[external]]
    assert service.job(later).reason == f"waits for job {external}"
    assert [job for job, *_ in service.launchers.started] == [own]
    service.store.start(external, (), time.time())
    service.new_manager().recover()
    service.turn()
    assert external not in service.launchers.adopted and service.state(external) is State.STARTING


def test_a_job_that_its_scheduler_cannot_get_now_rests_before_it_is_handed_over_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = a_clock(monkeypatch)
    job = service.add(engine=Engine.SLURM)
    handed_over: list[float] = []
    for _ in range(40):
        service.turn()
        if service.handed_over:
            handed_over.append(clock[0])
            service.handed_over.clear()
            service.store.start(job, (), time.time())
            service.manager.schedule()  # meanwhile
            service.manager.refused(job)
            service.store.withdraw(job, 1, "not started: /project: does not answer")
            service.manager.schedule()
        clock[0] += 5
    rests = [later - earlier for earlier, later in zip(handed_over, handed_over[1:], strict=False)]
    assert rests == [10.0, 20.0, 40.0, 80.0]
    assert service.job(job).reason == "not started: /project: does not answer"
    assert service.store.attempts(job) == []
    service.turn()
    service.store.start(job, (), time.time())
    service.store.set_external(job, 1, "7")  # it was submitted
    service.turn()
    assert service.manager._refusals == {}


def test_jobs_of_unknown_length_are_as_long_as_recent_ones(service: Service) -> None:
    """A slot is free for 100 s, and recent jobs ran for 50 s."""
    for _ in range(10):
        job = service.add()
        service.store.start(job, (Placement("h1", 1),), 1000.0)
        service.store.end_attempt(job, 1, ended=1050.0, state=State.SUCCEEDED)
    short, long = service.add(1), service.add(2)
    service.turn()
    for job, left in ((short, 100.0), (long, 1000.0)):
        service.launchers.begin(job)
        service.progress[Path(service.job(job).output_dir)] = Progress(0, 100, left)
    service.turn()
    blocked, unknown = service.add(2), service.add(1)
    service.turn()
    assert (service.state(blocked), service.state(unknown)) == (State.QUEUED, State.STARTING)


def test_a_job_whose_host_is_down_leaves_its_owner_s_limit_to_others(service: Service) -> None:
    service.store.set_limits(Limits(max_running=1))
    service.store.set_down("h2", "gone")
    large, small, other = service.add(4), service.add(1), service.add(1)
    service.turn()
    assert [service.state(job) for job in (large, small, other)] == [State.QUEUED, State.STARTING, State.QUEUED]
    assert service.job(other).reason == "limit of ann: 1 jobs run or start, 1 may"
