"""The service is killed at every stage of its jobs' lives, two of which are real: none is lost, none starts twice."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from jobs import WORKERS, steps, tiny, write_corpus
from service_process import ServiceProcess

from hvd_transformer.service.jobs import ACTIVE, ENDED, WAITING, Attempt, Job, State
from hvd_transformer.service.remote import client
from hvd_transformer.service.remote.address import Address
from hvd_transformer.service.remote.client import Client
from hvd_transformer.service.storage.store import Store

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_HOSTS = 2
SLOTS = 12
RUNNING, QUEUED, KILLS = 8, 50, 20  # stand-ins that run and wait beside two real jobs of two ranks each
STEPS, PACE = 100, 4  # of a real job, and the seconds of a step until the test lets it end

# A launcher that notes its start. That of a real job goes on as the real one; others run until the test ends them.
LAUNCHER = """#!/bin/sh
exit="$HVD_TRANSFORMER_EXIT_FILE"
spool="${exit%/*}"
job="${spool##*/}"
echo "$job" >>FOLDER/starts
case "$*" in *PacedTask*) exec PYTHON -m hvd_transformer.cli.main "$@" ;; esac
printf ! >"/proc/self/fd/$HVD_TRANSFORMER_BEGUN"
mkfifo "FOLDER/$job"
read -r _ <"FOLDER/$job"
printf '{"code": 0, "cause": "", "step": 1, "refused": {}, "lost": []}' >"$exit.new"
mv "$exit.new" "$exit"
"""


class Crashes:
    """A service with stand-ins beside its real jobs, which is killed again and again."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self.folder = hosts, folder
        self._starts, self._ended = folder / "starts", set[int]()
        self._starts.touch()
        launcher = folder / "launcher"
        launcher.write_text(LAUNCHER.replace("FOLDER", str(folder)).replace("PYTHON", sys.executable))
        launcher.chmod(0o755)
        program = (sys.executable, WORKERS / "serve_with.py", launcher)
        self.service = ServiceProcess(hosts, folder, "h1:6,h2:6", program=program)
        self.state = folder / "data" / "hvd-transformer" / "service"
        self.kills, self.slowest = 0, 0.0
        self._background = ThreadPoolExecutor(1)

    def started(self) -> list[int]:
        """The jobs whose launchers have been started, once for each time."""
        return [int(line) for line in self._starts.read_text().splitlines()]

    def jobs(self) -> dict[int, Job]:
        """All jobs, by id."""
        with closing(Store(self.state / "service.db", read_only=True)) as store:
            return {job.id: job for job in store.jobs()}

    def attempts(self) -> list[Attempt]:
        """All attempts of all jobs."""
        with closing(Store(self.state / "service.db", read_only=True)) as store:
            return [attempt for job in store.jobs() for attempt in store.attempts(job.id)]

    def spooled(self, what: str) -> set[int]:
        """The jobs of which an attempt has left this file: "lock", "begun" or "exit"."""
        return {int(path.parent.name) for path in self.state.glob(f"jobs/*/*.{what}")}

    def until(self, what: Callable[[], object]) -> None:
        """Wait for it, without a pause that an instant could slip through."""
        deadline = time.monotonic() + 120
        while not what():
            assert time.monotonic() < deadline, (
                f"{[job.state.value for job in self.jobs().values()]}\n{self.service.log()}"
            )
            time.sleep(0.001)

    def end_one(self) -> int | None:
        """End a stand-in; returns its job, or None if none runs."""
        for job in set(self.started()) - self._ended:
            with suppress(OSError):  # a real job, or a stand-in that is not so far
                os.close(os.open(self.folder / str(job), os.O_WRONLY | os.O_NONBLOCK))
                self._ended.add(job)
                return job
        return None

    def submit(self) -> Future[dict[str, Any]]:
        """Submit one more stand-in, in the background, as the command does."""
        request = {"name": "late", "folder": str(self.folder), "words": ["--preset", "tiny"]}
        return self._background.submit(Client(Address(state=self.state)).submit, request)

    def stops_with_more_jobs(self, known: int) -> bool:
        """Stop the service; let it go on unless it has more jobs now."""
        self.service.process.send_signal(signal.SIGSTOP)
        if len(self.jobs()) > known:
            return True
        self.service.process.send_signal(signal.SIGCONT)
        return False

    def checkers(self) -> set[int]:
        """The processes that check what is submitted; that of a killed service may live a little longer."""
        return {pid for pid, line in self._hosts.processes("h1").items() if "job_checker" in line}

    def kill(self) -> None:
        """SIGKILL to the service."""
        self.service.kill()
        self.kills += 1

    def restart(self) -> None:
        """Start the service again. It has then adopted what runs: no job has left its slots, none has been stopped."""
        before, began = self.jobs(), time.monotonic()
        self.service.restart()
        self.slowest = max(self.slowest, time.monotonic() - began)
        now = self.jobs()
        ended = self.spooled("exit")
        for number in set(self.started()) - ended:
            if before[number].state in ACTIVE:
                assert now[number].state in {State.STARTING, State.RUNNING}, now[number]


@pytest.fixture
def crashes(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crashes]:
    monkeypatch.setenv("HOROVOD_TEST_PACE", str(PACE))
    monkeypatch.setenv("HOROVOD_TEST_PACE_WHILE", str(tmp_path / "pace"))
    (tmp_path / "pace").touch()
    monkeypatch.setattr(client, "_PAUSES", (0.5,) * 240)  # however long a start of the service takes here
    made = Crashes(hosts, tmp_path)
    with closing(made.service):
        yield made


def real_job(corpus: Path) -> list[str]:
    return [
        *tiny(corpus), "task=paced:PacedTask", f"training.max_steps={STEPS}", "training.epochs=100000",
        "training.eval_every=1000000", "checkpoint.every_steps=20",
    ]  # fmt: skip


def final_weights(run: Path) -> bytes:
    return (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()


def most_slots(attempts: list[Attempt]) -> int:
    """The most slots that were given away at any moment."""
    moments = []
    for attempt in attempts:
        assert attempt.ended is not None
        ranks = sum(part.ranks for part in attempt.allocation)
        moments += [(attempt.began, ranks), (attempt.ended, -ranks)]
    used = most = 0
    for _, ranks in sorted(moments):
        used += ranks
        most = max(most, used)
    return most


def test_twenty_kills_with_two_real_jobs_among_ten_running_and_fifty_queued(
    hosts: Hosts, crashes: Crashes, tmp_path: Path
) -> None:
    corpus, rng = write_corpus(tmp_path / "corpus" / "text", train=20_000), random.Random(20)
    service, late = crashes.service, list[Future[dict[str, Any]]]()

    def submitted() -> None:
        """A submission has just been written down, and nobody was told, or it is being checked."""
        if late:
            late[-1].result(60)
        known, checkers = len(crashes.jobs()), crashes.checkers()
        late.append(crashes.submit())
        if len(late) % 2:
            crashes.until(lambda: crashes.stops_with_more_jobs(known))
        else:
            crashes.until(lambda: crashes.checkers() - checkers)

    def starting() -> None:
        """Slots are free; the next launcher has its lock, or runs."""
        locks = crashes.spooled("lock")
        crashes.until(crashes.end_one)
        crashes.until(lambda: crashes.spooled("lock") > locks)

    def running() -> None:
        """At some moment of a step."""
        time.sleep(rng.uniform(0.0, 0.5))

    def ending() -> None:
        """A launcher has just told how it ended."""
        exits = crashes.spooled("exit")
        crashes.until(crashes.end_one)
        crashes.until(lambda: crashes.spooled("exit") > exits)

    real = [service.submit("-np", 2, "--name", "real", "--", *real_job(corpus))[0] for _ in range(2)]
    crashes.until(lambda: set(crashes.started()) == set(real))  # their ranks are being started
    crashes.kill()
    crashes.restart()
    values = ",".join(map(str, range(RUNNING + QUEUED)))
    stand_ins = service.submit("--array", f"seed={values}", "--", "--preset", "tiny")
    crashes.until(lambda: crashes.spooled("begun") >= {*real, *stand_ins[:RUNNING]})
    states = [job.state for job in crashes.jobs().values()]
    assert sum(state in ACTIVE for state in states) == len(real) + RUNNING
    assert sum(state in WAITING for state in states) == QUEUED

    phases = [submitted, starting, running, ending]
    while crashes.kills < KILLS - len(real):
        phases[crashes.kills % len(phases)]()
        crashes.kill()
        if rng.random() < 0.5:
            crashes.end_one()  # while there is no service
        crashes.restart()
    assert set(real).isdisjoint(crashes.spooled("exit")), "the real jobs were to run through all this"
    (tmp_path / "pace").unlink()
    for number in range(1, len(real) + 1):
        crashes.until(lambda number=number: len(crashes.spooled("exit") & set(real)) >= number)  # type: ignore[misc]
        crashes.kill()
        crashes.restart()
    added = [number for answer in late for number in answer.result(60)["ids"]]
    crashes.until(lambda: crashes.end_one() is None and all(job.state in ENDED for job in crashes.jobs().values()))

    everything = crashes.jobs()
    assert sorted(everything) == sorted([*real, *stand_ins, *added])
    assert {job.state for job in everything.values()} == {State.SUCCEEDED}
    assert sorted(crashes.started()) == sorted(everything)
    attempts = crashes.attempts()
    assert sorted(attempt.job for attempt in attempts if attempt.code == 0) == sorted(everything)
    assert {attempt.cause for attempt in attempts if attempt.code != 0} <= {"not started: the service ended"}
    assert most_slots(attempts) <= SLOTS
    unbroken = service.runs / "unbroken"
    service.command("launch", "-np", 2, "-H", "h1:2", "--", *real_job(corpus), f"output_dir={unbroken}", timeout=120)
    for run in (Path(everything[number].output_dir) for number in real):
        assert [step for (step,) in steps(run)] == list(range(1, STEPS + 1))
        assert final_weights(run) == final_weights(unbroken)
    print(f"adopted within {crashes.slowest:.1f} s")
