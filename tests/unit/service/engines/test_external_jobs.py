"""The loop that follows jobs elsewhere: a real database, and a scheduler that a test moves on."""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from new_jobs import new_job

from hvd_transformer.errors import UserError
from hvd_transformer.service.actions import Actions
from hvd_transformer.service.engines import external_jobs
from hvd_transformer.service.engines.backend import Ended, EngineFault, OverLimit, Sighting, Submission
from hvd_transformer.service.engines.commands import Commands
from hvd_transformer.service.engines.external_jobs import ExternalJobs
from hvd_transformer.service.jobs import Attempt, Cause, Engine, Job, Needs, State
from hvd_transformer.service.launching.attempts import Launchers
from hvd_transformer.service.manager import Manager
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting import not_now
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.submitting.not_now import NotNow


class FakeScheduler:
    """Keeps attempts by name. `crash`: the service is killed behind the next submission, before it hears of it."""

    title = "Slurm"

    def __init__(self) -> None:
        self.attempts: dict[str, Sighting] = {}
        self.submitted: list[Submission] = []
        self.stopped: list[tuple[str, bool]] = []
        self.cleaned: list[str] = []
        self.looks = 0
        self.fault: Exception | None = None
        self.faulty: set[int] = set()  # the only jobs that have it, if there are any
        self.asked = 0  # how often it was told
        self.crash = False

    def look(self, wanted: Mapping[str, str | None]) -> Mapping[str, Sighting]:
        self.looks += 1
        if isinstance(self.fault, EngineFault) and not isinstance(self.fault, OverLimit):
            raise self.fault
        return {name: found for name, found in self.attempts.items() if name in wanted}

    def gone(self, external: str) -> Sighting:
        return Sighting(external, f"{external} is gone", ended=Ended.EXITED)

    def submit(self, attempt: Submission) -> str:
        if isinstance(self.fault, UserError | OverLimit) and attempt.job.id in (self.faulty or {attempt.job.id}):
            self.asked += 1
            raise self.fault
        assert attempt.name not in self.attempts, "started twice"
        self.submitted.append(attempt)
        external = str(len(self.submitted))
        self.attempts[attempt.name] = Sighting(external, f"job {external}: Resources")
        if self.crash:
            self.crash = False
            raise KeyboardInterrupt
        return external

    def stop(self, sightings: Sequence[Sighting], now: bool) -> None:
        self.stopped += [(found.external, now) for found in sightings]

    def clean(self, claim: str) -> None:
        self.cleaned.append(claim)

    def see(self, external: str, words: str = "", **fields: Any) -> None:
        (name,) = (name for name, found in self.attempts.items() if found.external == external)
        self.attempts[name] = Sighting(external, words, **fields)


class Service:
    """What is left when it is killed is in the folder, and in the scheduler."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scheduler = folder, FakeScheduler()
        self.job_file_fault: UserError | None = None
        self.faulty: set[int] = set()  # the only jobs that have it, if there are any
        self.refused: list[int] = []
        self.checked: list[int] = []
        self.store = Store(folder / "service.db")
        self.jobs = self._new()

    def _new(self) -> ExternalJobs:
        backends = {Engine.SLURM: self.scheduler}
        return ExternalJobs(
            self.store, backends, self._job_file, self.folder, Commands(), lambda: None, self.refused.append
        )

    def _job_file(self, job: Job, name: str) -> str:
        self.checked.append(job.id)
        if self.job_file_fault is not None and job.id in (self.faulty or {job.id}):
            raise self.job_file_fault
        return f"file of {name}"

    def restart(self) -> None:
        self.store.close()
        self.store = Store(self.folder / "service.db")
        self.jobs = self._new()

    def queue(self, **fields: Any) -> int:
        given = {
            "output_dir": str(self.folder / "runs" / "{id}"), "folder": str(self.folder), "needs": Needs(2, 2),
            "engine": Engine.SLURM,
        }  # fmt: skip
        (number,) = self.store.add_jobs([new_job(**{**given, **fields})])
        return number

    def add(self, **fields: Any) -> int:
        number = self.queue(**fields)
        self.jobs.accept([number])
        return number

    def job(self, number: int) -> Job:
        found = self.store.job(number)
        assert found is not None
        return found

    def tell(self, number: int, attempt: int = 1, **how: Any) -> None:
        """The launcher tells how it has ended."""
        file = Path(self.job(number).output_dir) / ".attempts" / f"{attempt}.exit"
        file.write_text(json.dumps({"code": 0, "cause": "", "step": 3, "refused": {}, "lost": [], **how}))

    def cancel(self, number: int) -> None:
        self.store.update(number, state=State.STOPPING, stopping=Cause.CANCELLED)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.store.close()


def test_a_job_from_its_submission_to_its_end(service: Service) -> None:
    number = service.add()
    service.jobs.look()
    (sent,) = service.scheduler.submitted
    assert sent.file == f"file of {sent.claim}" and sent.name == f"{sent.claim}-1"
    service.jobs.look()
    assert (service.job(number).state, service.job(number).reason) == (State.STARTING, "job 1: Resources")
    service.scheduler.see("1", "job 1 on h1", runs=True)
    service.jobs.look()
    assert (service.job(number).state, service.job(number).reason) == (State.RUNNING, "job 1 on h1")
    service.scheduler.see("1", "job 1: COMPLETED", ended=Ended.EXITED, code=0)
    service.tell(number)
    service.jobs.look()
    assert service.job(number).state is State.SUCCEEDED
    (attempt,) = service.store.attempts(number)
    assert (attempt.external, attempt.code, attempt.last_step, attempt.allocation) == ("1", 0, 3, ())
    looks = service.scheduler.looks
    assert not service.jobs.look() and service.scheduler.looks == looks  # nobody is asked about no jobs


def test_a_service_that_is_killed_behind_a_submission_finds_the_job_again(service: Service) -> None:
    number = service.add()
    service.scheduler.crash = True
    with pytest.raises(KeyboardInterrupt):
        service.jobs.look()
    assert service.store.attempts(number)[0].external is None
    service.restart()
    for _ in range(3):
        service.jobs.look()
    assert len(service.scheduler.submitted) == 1
    assert service.store.attempts(number)[0].external == "1"


def test_a_service_that_is_killed_before_a_submission_makes_up_for_it(service: Service) -> None:
    number = service.add()
    service.restart()
    service.jobs.look()
    assert len(service.scheduler.submitted) == 1 and service.job(number).state is State.STARTING


def test_a_scheduler_that_does_not_answer_loses_nothing(service: Service) -> None:
    number = service.add()
    service.scheduler.fault = EngineFault("squeue: did not end within 60 s")
    service.jobs.look()
    assert service.job(number).reason == "Slurm: squeue: did not end within 60 s"
    assert service.scheduler.submitted == []
    service.scheduler.fault = None
    for _ in range(2):
        service.jobs.look()
    assert service.job(number).reason == "job 1: Resources"


def test_what_the_scheduler_refuses_fails_at_once(service: Service) -> None:
    number = service.add()
    service.scheduler.fault = UserError("sbatch: Invalid partition name specified")
    service.jobs.look()
    job = service.job(number)
    assert (job.state, job.reason) == (State.FAILED, "sbatch: Invalid partition name specified")
    assert service.store.attempts(number)[0].code == 2


def test_jobs_wait_for_a_folder_that_is_away_and_the_others_do_not(service: Service) -> None:
    folder = service.folder / "project"
    away = [service.add(folder=str(folder)) for _ in range(30)]  # more than are submitted at once
    other = service.add()
    service.jobs.look()
    assert [sent.job.id for sent in service.scheduler.submitted] == [other]
    why = f"not started: {folder}: No such file or directory; the job starts in this folder"
    assert {(service.job(job).state, service.job(job).reason) for job in away} == {(State.QUEUED, why)}
    assert service.refused == away
    assert service.store.external_owners() == {service.job(other).owner: 1}  # they use up nobody's limit
    service.scheduler.see("1", ended=Ended.EXITED, code=0)
    service.jobs.look()
    looks = service.scheduler.looks
    assert not service.jobs.look() and service.scheduler.looks == looks  # nobody is asked about jobs that rest
    service.jobs.accept(away)
    service.cancel(away[0])
    folder.mkdir()
    for _ in range(3):
        service.jobs.look()
    assert service.job(away[0]).state is State.CANCELLED
    assert [sent.job.id for sent in service.scheduler.submitted] == [other, *away[1:]]
    assert service.job(away[1]).reason == "job 2: Resources"
    assert [attempt.number for attempt in service.store.attempts(away[1])] == [1]


def test_jobs_over_a_limit_of_the_scheduler_wait_and_the_others_do_not(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with the same options wait behind the first one, in order; the scheduler is not asked about each."""
    over = [service.add(sbatch=["--qos=short"]) for _ in range(30)]
    other = service.add(sbatch=["--qos=long"])
    service.scheduler.fault, service.scheduler.faulty = OverLimit("job submit limit"), set(over)
    service.jobs.look()
    assert service.scheduler.asked == 1
    assert [sent.job.id for sent in service.scheduler.submitted] == [other]
    assert {(service.job(job).state, service.job(job).reason) for job in over} == {
        (State.STARTING, "Slurm: job submit limit")
    }
    service.cancel(over[5])
    reads: list[int] = []
    original = Store.job
    monkeypatch.setattr(Store, "job", lambda store, number: reads.append(number) or original(store, number))
    service.jobs.look()
    assert set(reads) == {over[0], over[5]}  # not those that wait: there may be thousands, every few seconds
    assert service.job(over[5]).state is State.CANCELLED
    service.scheduler.fault = None
    service.jobs.look()
    left = [job for job in over if job != over[5]]
    assert [sent.job.id for sent in service.scheduler.submitted] == [other, *left[:20]]


def test_the_manager_lets_jobs_rest_that_cannot_be_submitted_now(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempts pile up, another job of the owner has its turn, and no retry is used up."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    launchers = Launchers(service.folder / "state")
    manager = Manager(service.store, launchers, lambda run: None, hand_over=lambda jobs: service.jobs.accept(jobs))
    service.store.set_limits(Limits(max_running=1))
    job, other = service.queue(), service.queue()
    service.job_file_fault, service.faulty = NotNow("it does not answer"), {job}
    refused: list[float] = []

    def turn() -> None:
        manager.schedule()
        service.jobs.look()
        while service.refused:
            manager.refused(service.refused.pop())
            refused.append(clock[0] - 1000.0)
        clock[0] += 5

    turn()
    assert (service.job(job).state, service.job(job).reason) == (State.QUEUED, "not started: it does not answer")
    for _ in range(40):
        turn()
    assert (service.store.attempts(job), service.job(job).retries) == ([], 0)
    assert [sent.job.id for sent in service.scheduler.submitted] == [other]
    assert refused == [0.0]
    service.scheduler.see("1", ended=Ended.EXITED, code=0)
    service.job_file_fault = None
    for _ in range(2):
        turn()
    assert [sent.job.id for sent in service.scheduler.submitted] == [other, job]
    launchers.close()


def test_a_private_file_that_is_away_and_a_full_disk_are_waited_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, mkdir = service.folder / "secret", Path.mkdir
    number = service.add(env_names=("TOKEN",), env_file=str(secret))
    full = service.add()

    def no_space(self: Path, *more: Any, **named: Any) -> None:
        if self == Path(service.job(full).output_dir) / ".attempts":
            raise OSError(28, "No space left on device", str(self))
        mkdir(self, *more, **named)

    monkeypatch.setattr(Path, "mkdir", no_space)
    service.jobs.look()
    reasons = [service.job(job).reason for job in (number, full)]
    assert reasons == [
        f"not started: --env-file {secret}: cannot be read: No such file or directory",
        f"not started: {service.job(full).output_dir}/.attempts: No space left on device",
    ]
    secret.write_text("OTHER=1")
    secret.chmod(0o600)
    service.restart()
    service.jobs.look()
    assert service.job(number).state is State.QUEUED
    service.jobs.accept([number, full])
    service.jobs.look()
    assert (service.job(number).state, service.job(full).state) == (State.FAILED, State.QUEUED)
    assert service.job(number).reason == f"--env TOKEN: not in {secret}"


def test_a_run_directory_that_is_a_file_is_wrong_input(service: Service) -> None:
    (service.folder / "file").touch()
    number = service.add(output_dir=str(service.folder / "file"))
    other = service.add()
    service.jobs.look()
    assert (service.job(number).state, service.job(other).state) == (State.FAILED, State.STARTING)
    assert service.store.attempts(number)[0].code == 2


def test_a_fault_of_the_checking_process_fails_no_job(service: Service) -> None:
    numbers = [service.add() for _ in range(3)]
    service.job_file_fault = NotNow("the process that checks configurations does not answer; try again")
    service.jobs.look()
    assert [(service.job(number).state, service.job(number).reason) for number in numbers] == [
        (State.QUEUED, f"not started: {service.job_file_fault}"),
        (State.STARTING, f"Slurm: {service.job_file_fault}"),
        (State.STARTING, f"Slurm: {service.job_file_fault}"),
    ]
    assert service.checked == numbers[:2]  # each takes a minute to find that out
    service.job_file_fault = None
    service.jobs.accept(numbers[:1])
    service.jobs.look()
    assert len(service.scheduler.submitted) == 3
    service.job_file_fault = UserError("--image: is needed")  # what it says of the job
    wrong = service.add()
    service.jobs.look()
    assert (service.job(wrong).state, service.job(wrong).reason) == (State.FAILED, "--image: is needed")


def test_jobs_whose_checks_hang_keep_no_others_from_their_submission(service: Service) -> None:
    bad, good, also_bad, also_good = numbers = [service.add() for _ in range(4)]
    service.job_file_fault = NotNow("the process that checks configurations does not answer; try again")
    service.faulty = {bad, also_bad}
    service.jobs.look()
    assert [sent.job.id for sent in service.scheduler.submitted] == [good, also_good]
    assert [service.job(number).state for number in numbers] == [State.QUEUED, State.STARTING] * 2
    assert service.refused == [bad, also_bad]


def test_jobs_do_not_wait_for_the_folder_of_another_that_never_answers(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, hung, go = os.stat, str(service.folder / "hung"), threading.Event()

    def hang(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(hung):
            go.wait(60)
        return stat(path, *more, **named)

    monkeypatch.setattr(not_now, "_ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(not_now, "_ANSWER_SECONDS_MEANWHILE", 20.0)
    monkeypatch.setattr(os, "stat", hang)
    stuck, other = service.add(folder=hung), service.add()
    try:
        service.jobs.look()
    finally:
        go.set()
    assert (service.job(stuck).state, service.job(other).state) == (State.QUEUED, State.STARTING)
    assert service.job(stuck).reason == f"not started: {hung}: does not answer"
    assert [sent.job.id for sent in service.scheduler.submitted] == [other]


def test_a_run_directory_behind_a_link_whose_target_is_away_is_waited_for(service: Service) -> None:
    link = service.folder / "link"
    link.symlink_to(service.folder / "scratch")
    number = service.add(output_dir=str(link / "{id}"))
    service.jobs.look()
    why = f"not started: {link}: this symbolic link leads to a folder that does not exist"
    assert (service.job(number).state, service.job(number).reason) == (State.QUEUED, why)
    (service.folder / "scratch").mkdir()
    service.jobs.accept([number])
    service.jobs.look()
    assert len(service.scheduler.submitted) == 1


def test_a_fault_of_the_database_fails_no_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    number = service.add(time_limit=60.0)
    read = service.store.attempts

    def fail_once(job: int) -> list[Attempt]:
        monkeypatch.undo()
        raise UserError("service.db: it cannot be opened")

    monkeypatch.setattr(service.store, "attempts", fail_once)
    with pytest.raises(UserError, match="it cannot be opened"):
        service.jobs.look()
    assert service.store.attempts == read
    assert service.job(number).state is State.STARTING
    service.jobs.look()
    assert len(service.scheduler.submitted) == 1


@pytest.mark.parametrize("action", ["hold", "cancel"])
def test_the_time_in_the_scheduler_s_own_queue_is_no_running_time(service: Service, action: str) -> None:
    number = service.add(time_limit=3600.0)
    actions = Actions(service.store, Checker(service.folder), service.folder, lambda: None, lambda job: None)
    service.jobs.look()
    with service.store.database.write() as connection:  # it has waited for ten hours
        connection.execute("UPDATE attempts SET began = began - 36000")
    getattr(actions, action)(number)
    service.jobs.look()
    service.scheduler.see("1", "job 1: CANCELLED", ended=Ended.CANCELLED)
    service.jobs.look()
    assert [attempt.seconds for attempt in service.store.attempts(number)] == [0.0]
    (actions.release if action == "hold" else actions.retry)(number)
    service.jobs.accept([number])
    service.jobs.look()
    assert [sent.seconds for sent in service.scheduler.submitted] == [3600.0, 3600.0]


@pytest.mark.parametrize("how", ["told", "lost", "time limit"])
@pytest.mark.parametrize("away", [True, False], ids=["service away", "between two looks"])
def test_a_job_that_begins_and_ends_unseen_has_run(service: Service, how: str, away: bool) -> None:
    number = service.add(time_limit=7200.0)
    for _ in range(2):
        service.jobs.look()
    with service.store.database.write() as connection:
        connection.execute("UPDATE attempts SET began = began - 3600")
    if away:
        service.restart()
    if how == "told":
        service.tell(number, code=1, lost=["h1"])
    ended = {"told": Ended.EXITED, "lost": Ended.LOST, "time limit": Ended.TIME_LIMIT}[how]
    service.scheduler.see("1", "job 1", ended=ended, code=1)
    service.jobs.look()
    # What it was seen to wait is no running time.
    assert [one.seconds for one in service.store.attempts(number)] == [pytest.approx(3600 if away else 0, abs=60)]
    if how != "time limit":
        service.jobs.accept([number])
        service.jobs.look()
        assert service.scheduler.submitted[-1].seconds == pytest.approx(3600 if away else 7200, abs=60)


def test_what_a_job_ran_while_the_service_was_away_is_running_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(external_jobs.time, "time", lambda: now)
    monkeypatch.setattr(external_jobs, "_WAITED_SECONDS", 0.0)
    number = service.add(time_limit=7200.0)
    service.jobs.look()
    now += 36_000
    service.jobs.look()  # it still waits
    service.restart()
    now += 600
    service.scheduler.see("1", "job 1 on h1", runs=True)
    service.jobs.look()
    now += 60
    service.scheduler.see("1", "job 1", ended=Ended.LOST)
    service.jobs.look()
    assert [one.seconds for one in service.store.attempts(number)] == [pytest.approx(660, abs=1)]


def test_ranks_that_save_get_no_second_signal(service: Service) -> None:
    number = service.add()
    service.jobs.look()
    service.scheduler.see("1", "job 1 on h1", runs=True)
    service.jobs.look()
    service.cancel(number)
    service.jobs.look()
    service.restart()
    service.jobs.look()
    assert service.scheduler.stopped == [("1", False)]
    service.jobs.kill(number)
    service.jobs.look()
    assert service.scheduler.stopped == [("1", False), ("1", True)]
    service.scheduler.see("1", "job 1: CANCELLED", ended=Ended.CANCELLED)
    service.jobs.look()
    assert service.job(number).state is State.CANCELLED


def test_a_job_that_is_to_be_killed_is_killed_by_the_next_service(service: Service) -> None:
    number = service.add()
    service.jobs.look()
    service.scheduler.see("1", "job 1 on h1", runs=True)
    service.jobs.look()
    service.store.update(number, state=State.STOPPING, stopping=Cause.KILLED)
    service.restart()
    service.jobs.look()
    service.jobs.look()
    assert service.scheduler.stopped == [("1", True)]


def test_a_job_that_is_cancelled_before_its_submission_is_never_submitted(service: Service) -> None:
    number = service.add()
    service.cancel(number)
    service.jobs.look()
    assert service.job(number).state is State.CANCELLED and service.scheduler.submitted == []


def test_a_lost_job_is_submitted_again_under_another_name(service: Service) -> None:
    number = service.add(max_retries=1)
    service.jobs.look()
    for external in ("1", "2"):
        service.scheduler.see(external, "job: NODE_FAIL", ended=Ended.LOST)
        service.jobs.look()
        service.jobs.accept([number])  # as the manager does with queued jobs
        service.jobs.look()
    assert [sent.number for sent in service.scheduler.submitted] == [1, 2]
    assert (service.job(number).state, service.job(number).retries) == (State.FAILED, 1)


def test_a_job_that_the_scheduler_has_forgotten_ends_as_its_launcher_told(service: Service) -> None:
    told, silent = service.add(), service.add(max_retries=0)
    service.jobs.look()
    service.tell(told)
    service.scheduler.attempts.clear()
    service.jobs.look()
    assert [service.job(number).state for number in (told, silent)] == [State.SUCCEEDED, State.FAILED]


def test_the_time_limit_of_all_attempts_is_passed_on(service: Service) -> None:
    number = service.add(time_limit=3600.0)
    service.jobs.look()
    with service.store.database.write() as connection:
        connection.execute("UPDATE attempts SET began = began - 600")
    service.store.begin_external(number, 1, "", 0.0)
    service.scheduler.see("1", "preempted", ended=Ended.PREEMPTED)
    service.jobs.look()
    service.jobs.accept([number])
    service.jobs.look()
    first, second = (sent.seconds for sent in service.scheduler.submitted)
    assert first == 3600.0 and second == pytest.approx(3000.0, abs=60.0)
    service.scheduler.see("2", "TIMEOUT", ended=Ended.TIME_LIMIT)
    service.jobs.look()
    assert (service.job(number).state, service.job(number).reason) == (
        State.FAILED,
        "reached its time limit of 3600 s",
    )


def test_thousands_of_jobs_take_one_look(service: Service) -> None:
    jobs = [
        new_job(output_dir=f"{service.folder}/runs/{number}", engine=Engine.SLURM, max_retries=0)
        for number in range(1000)
    ]
    numbers = service.store.add_jobs(jobs)
    while waiting := [job.id for job in service.store.waiting()]:
        service.jobs.accept(waiting)
    for number in numbers:
        service.store.set_external(number, 1, str(number))
    service.jobs.look()
    assert service.scheduler.looks == 1
    assert service.store.counts() == {State.FAILED: 1000}


def test_the_thread_follows_jobs_by_itself_and_rests_without(service: Service) -> None:
    service.jobs.start()
    number = service.add()
    deadline = time.monotonic() + 60
    while not service.scheduler.submitted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    service.jobs.close()
    service.restart()
    assert service.job(number).state is State.STARTING


def test_the_ids_of_jobs_that_were_handed_over_are_not_used_again(service: Service) -> None:
    """An older database is put back, while the scheduler still has the jobs that it does not know."""
    backup = service.folder / "backup.db"
    with closing(sqlite3.connect(service.folder / "service.db")) as database:
        database.execute("VACUUM INTO ?", (str(backup),))
    number = service.add()
    service.jobs.look()
    service.store.close()
    for file in service.folder.glob("service.db*"):
        file.unlink()
    backup.rename(service.folder / "service.db")
    service.restart()
    service.store.skip_used_ids(service.folder / "jobs")
    assert service.add() > number
    service.jobs.look()
    assert len(service.scheduler.submitted) == 2


def test_a_run_directory_that_does_not_answer_at_the_end_of_its_job_stops_no_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(not_now, "_ANSWER_SECONDS", 0.2)
    away, other = service.add(), service.add()
    service.jobs.look()
    os.mkfifo(Path(service.job(away).output_dir) / ".attempts" / "1.exit")  # who opens it waits for a writer
    service.scheduler.see("1", "job 1: COMPLETED", ended=Ended.EXITED, code=0)
    service.scheduler.see("2", "job 2: COMPLETED", ended=Ended.EXITED, code=0)
    service.tell(other)
    service.jobs.look()
    assert service.job(other).state is State.SUCCEEDED
    assert service.job(away).state is State.STARTING and "does not answer" in service.job(away).reason
    file = Path(service.job(away).output_dir) / ".attempts" / "1.exit"
    with file.open("w"):  # now it answers
        pass
    file.unlink()
    service.tell(away)
    time.sleep(0.5)
    service.jobs.look()
    assert service.job(away).state is State.SUCCEEDED


def test_a_job_that_was_never_submitted_is_cancelled_while_the_scheduler_takes_none(service: Service) -> None:
    first, second = service.add(), service.add()
    service.cancel(second)
    service.scheduler.submit = lambda attempt: (_ for _ in ()).throw(EngineFault("sbatch: timed out"))  # type: ignore
    service.jobs.look()
    assert service.job(second).state is State.CANCELLED
    assert "timed out" in service.job(first).reason
