"""A job that does not move ends by itself and says which rank is late and where; a slow rank is named with its cost."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import FAULTY, TRAIN, Job, lines, started, tiny, write_corpus

from hvd_transformer.errors import STALLED

pytestmark = pytest.mark.distributed

HOST = os.uname().nodename
RANK = 1  # that is at fault
STEP = 20  # of which
CASES = {"stop": "gloo", "hang": "mpi", "prepare": "gloo"}  # the fault and how the ranks talk


class Ended(NamedTuple):
    """A job that is gone."""

    run: Path
    code: int
    screen: str

    def told(self) -> str:
        """The watchdog's one line."""
        (line,) = re.findall(r"hvd-transformer: (no .*)", self.screen)
        return line

    def log(self, rank: int) -> str:
        return (self.run / f"logs/rank-{rank:03d}.log").read_text(encoding="utf-8")

    def beat(self, rank: int) -> dict:
        return json.loads((self.run / f"logs/beat-{rank}").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Iterator[dict[str, Future[Ended]]]:
    """Every case's job, all at once: most of each is its start and its limit."""
    folder = tmp_path_factory.mktemp("watchdog")
    corpus = write_corpus(folder / "text", train=12000)

    def end(fault: str) -> Ended:
        run = folder / fault
        words = [
            *tiny(corpus),
            f"data.cache_dir={folder / f'cache-{fault}'}",
            f"output_dir={run}",
            f"training.epochs={1 if fault == 'prepare' else 10000}",
            "training.stall_seconds=5",
            "training.eval_every=1000000",
            "checkpoint.every_steps=none",
        ]
        command = [TRAIN] if fault == "stop" else [*FAULTY, RANK, STEP, fault]
        with started(2, [*command, *words], CASES[fault], run.with_suffix(".screen")) as job:
            if fault == "stop":
                _wait_for_step(job, run)
                job.ranks()[RANK].kill(signal.SIGSTOP)
            code = job.wait(180)
            job.wait_gone(20)
            return Ended(run, code, job.text())

    with ThreadPoolExecutor(len(CASES)) as pool:
        yield {fault: pool.submit(end, fault) for fault in CASES}


def _wait_for_step(job: Job, run: Path) -> None:
    deadline = time.monotonic() + 180
    while not (run / "metrics.jsonl").exists() or len(lines(run)) < STEP or not _has_told_a_step(run):
        assert time.monotonic() < deadline and job.popen.poll() is None, job.text()
        time.sleep(0.05)


def _has_told_a_step(run: Path) -> bool:
    """Heartbeats come twice a second, steps much faster."""
    beat = run / f"logs/beat-{RANK}"
    return beat.exists() and json.loads(beat.read_text(encoding="utf-8"))["step"] > 0


def test_a_stopped_rank_is_named_and_the_job_ends(ended):
    job = ended["stop"].result()
    assert job.code == 1  # horovodrun's
    late = rf"no step for \d+ s: rank {RANK} on host {HOST} is late: no sign of life for \d+ s, last in \w+ .*; "
    waits = rf"rank 0 waits for it in allreduce of .* of step \d+; stacks are in {job.run}/logs/"
    assert re.fullmatch(late + waits, job.told())
    assert re.search(r'comm/group.py", line \d+ in wait\b', job.log(0))
    last = job.beat(RANK)
    assert (last["rank"], last["host"], last["late"]) == (RANK, HOST, False)
    assert 0 < last["step"] < last["total_steps"] and last["limit_seconds"] == 5


def test_a_hanging_function_is_in_the_ranks_own_log(ended):
    job = ended["hang"].result()
    assert job.code == STALLED  # which mpirun passes on
    late = rf"no step for \d+ s: rank {RANK} on host {HOST} is late: in forward of step {STEP} for \d+ s; "
    assert re.match(rf"{late}rank 0 waits for it in allreduce of .* of step {STEP}; stacks are in", job.told())
    assert "in hang_on_purpose" in job.log(RANK) and "in hang_on_purpose" not in job.log(0)
    assert job.beat(RANK)["late"] and job.beat(0)["late"]
    assert job.beat(RANK)["phase"] == "forward" and job.beat(RANK)["waits_for"] is None


def test_a_rank_whose_data_is_ready_waits_for_another_host(ended):
    """For longer than a rank may be without progress."""
    job = ended["prepare"].result()
    assert job.code == 0, job.screen
    assert "no progress" not in job.screen and "finished" in (job.run / "summary.json").read_text(encoding="utf-8")


def test_a_slow_rank_is_named_with_its_cost(ended):
    """It was slow before it hung."""
    job = ended["hang"].result()
    ((rank, work, others, cost),) = re.findall(
        rf"warning: rank (\d) on host {HOST} is slow: (\d+) ms of work per step, the others need (\d+) ms; "
        r"every step of the job waits (\d+) ms for it",
        job.screen,
    )
    assert int(rank) == RANK and int(work) >= 250
    assert abs(int(work) - int(others) - int(cost)) <= 1
    compared = [line for line in lines(job.run) if "slowest_rank" in line]
    assert {line["slowest_rank"] for line in compared} == {RANK}
    # Each rank's heartbeat has what was compared last.
    assert 1000 * job.beat(RANK)["work_seconds"] == compared[-1]["slowest_work_milliseconds"]
    assert 1000 * job.beat(0)["work_seconds"] == compared[-1]["others_work_milliseconds"]
    assert "is slow" in job.log(0) and "is slow" not in job.log(RANK)
