"""A stage that fails at any micro-batch, forward or backward, ends both ranks soon, with the cause on the screen."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import FAULTY, lines, started, tiny, write_corpus

pytestmark = pytest.mark.distributed

STEP, PIECES = 3, 4
LAYERS = [["embedding", "blocks.0"], ["blocks.1", "head"]]  # of the two stages


class Case(NamedTuple):
    direction: str
    stage: int
    number: int  # of the micro-batch
    rank: int
    schedule: str


# Either rank, either schedule and either end of the step, the second for `make test-all`; every micro-batch is in
# tests/unit/parallel/test_pipeline.py.
LAST = PIECES - 1
CASES = [
    Case("forward", 0, 0, rank=0, schedule="1f1b"),
    Case("backward", 1, LAST, rank=1, schedule="gpipe"),
]


class Ended(NamedTuple):
    """A job that is gone."""

    run: Path
    code: int
    at: float
    screen: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Callable[[Case], Ended]:
    """Runs the case's job until it is gone."""
    folder = tmp_path_factory.mktemp("stages")
    corpus = write_corpus(folder / "text", train=3500)

    def end(case: Case) -> Ended:
        fault = f"{case.direction}-{case.stage}-{case.number}"
        run = folder / f"{fault}-{case.rank}"
        words = [
            *tiny(corpus),
            f"output_dir={run}",
            "parallel.pipeline=2",
            "parallel.partition=uniform",
            f"parallel.micro_batches={PIECES}",
            f"parallel.schedule={case.schedule}",
        ]
        with started(2, [*FAULTY, case.rank, STEP, fault, *words], "gloo", run.with_suffix(".screen")) as job:
            code = job.wait(120)
            job.wait_gone(20)
            return Ended(run, code, time.time(), job.text())

    return end


@pytest.mark.parametrize(
    "case", [CASES[0], pytest.param(CASES[1], marks=pytest.mark.slow)], ids=lambda case: "-".join(map(str, case))
)
def test_both_ranks_end_and_the_cause_is_shown(ended, case):
    job = ended(case)
    assert job.code != 0
    assert [line["step"] for line in lines(job.run)] == list(range(1, STEP))
    first, last = LAYERS[case.stage]
    where = f"layer {first}" if case.direction == "forward" else f"layers {first} to {last}"
    place = f"stage {case.stage}, {where}, micro-batch {case.number}, {case.direction}"
    log = (job.run / f"logs/rank-{case.rank:03d}.log").read_text()
    assert f"StageFailed: {place}: failed on purpose at " in log
    if case.direction == "forward":  # memory ran out, for which one line is enough
        assert f"hvd-train: rank {case.rank} on " in job.screen
        assert f": out of memory in step {STEP} ({place}); " in job.screen
        assert "torch.OutOfMemoryError: " in log and "OutOfMemoryError" not in job.screen
    else:
        assert f"hvd-train: rank {case.rank} failed:" in job.screen
        assert f"StageFailed: {place}: failed on purpose at " in job.screen
    raised = re.search(r"Error: failed on purpose at ([\d.]+)", log)
    assert raised, log
    seconds = job.at - float(raised[1])
    print(f"all gone {seconds:.1f} s after the error")
    assert 0 < seconds < 30  # not by the watchdog, which waits for minutes; a busy machine is slow
