"""How attempts have ended, and what becomes of their jobs: launcher and scheduler may say different things."""

from pathlib import Path

import pytest
from engine_jobs import job

from hvd_transformer.service.engines.backend import Ended, Sighting
from hvd_transformer.service.engines.conclusion import conclude
from hvd_transformer.service.jobs import Cause, Engine, State
from hvd_transformer.service.outcome import Exit, outcome

FAILED = Exit(1, "rank 1 on host h2 failed first, with exit code 1", 5)
STOPPED = Exit(1, "it was asked to stop", 5)
SIGNALLED = Exit(1, "it was asked to stop", 5, stopped="SIGTERM")  # by its script
BY_REQUEST = Exit(1, "it was asked to stop", 5, stopped="request")
DONE = Exit(0, "", 9)


@pytest.mark.parametrize(
    ("ended", "code", "told", "state", "retries", "reason"),
    [
        (Ended.EXITED, 0, DONE, State.SUCCEEDED, 0, ""),
        (Ended.EXITED, 0, None, State.SUCCEEDED, 0, ""),
        (Ended.EXITED, None, DONE, State.SUCCEEDED, 0, ""),  # squeue has forgotten it
        (Ended.TIME_LIMIT, None, DONE, State.SUCCEEDED, 0, ""),
        (Ended.EXITED, 1, FAILED, State.FAILED, 0, "rank 1 on host h2 failed first, with exit code 1"),
        (Ended.EXITED, 2, Exit(2, "lr: must be above 0"), State.FAILED, 0, "lr: must be above 0"),
        (Ended.EXITED, 1, SIGNALLED, State.FAILED, 0, "command not found"),  # its script has given up, and has said why
        (Ended.EXITED, 75, SIGNALLED, State.QUEUED, 0, "words: saved before its time limit"),
        (Ended.EXITED, 1, BY_REQUEST, State.CANCELLED, 0, "stopped with hvd-transformer stop"),
        (Ended.EXITED, 127, None, State.FAILED, 0, "words: command not found"),
        (Ended.EXITED, 75, Exit(75, "rank 1 stalled", 5), State.QUEUED, 1, "retry 1 of 3: rank 1 stalled"),
        (Ended.EXITED, 75, STOPPED, State.QUEUED, 0, "words: saved before its time limit"),
        (Ended.EXITED, 1, Exit(1, "lost h2", 5, lost=("h2",)), State.QUEUED, 1, "retry 1 of 3: lost h2"),
        (Ended.EXITED, 2, Exit(2, "no ssh", refused={"h2": "no ssh"}), State.QUEUED, 1, "retry 1 of 3: no ssh"),
        (Ended.EXITED, None, None, State.QUEUED, 1, "retry 1 of 3: words: command not found"),
        (Ended.LOST, None, STOPPED, State.QUEUED, 1, "retry 1 of 3: words"),
        (Ended.PREEMPTED, None, STOPPED, State.QUEUED, 0, "words"),
        (Ended.TIME_LIMIT, None, None, State.QUEUED, 1, "retry 1 of 3: words"),
        (Ended.CANCELLED, None, STOPPED, State.FAILED, 0, "words"),
    ],
)
def test_what_becomes_of_a_job(
    tmp_path: Path, ended: Ended, code: int | None, told: Exit | None, state: State, retries: int, reason: str
) -> None:
    of = job(tmp_path)
    exit, at_limit = conclude(of, Sighting("1", "words", ended=ended, code=code), told, "command not found")
    assert not at_limit
    what = outcome(of, exit)
    assert (what.state, int(what.retry), what.reason) == (state, retries, reason)
    if told is not None:
        assert exit.step == told.step


@pytest.mark.parametrize(
    ("ended", "code", "told", "at_limit"),
    [
        (Ended.EXITED, 75, STOPPED, True),
        (Ended.TIME_LIMIT, None, None, True),
        (Ended.EXITED, 75, Exit(75, "stalled"), False),
        (Ended.PREEMPTED, None, STOPPED, False),
        (Ended.EXITED, 0, DONE, False),
    ],
)
def test_a_job_with_a_time_limit_of_its_own_has_reached_that(
    tmp_path: Path, ended: Ended, code: int | None, told: Exit | None, at_limit: bool
) -> None:
    sighting = Sighting("1", "words", ended=ended, code=code)
    assert conclude(job(tmp_path, time_limit=60.0), sighting, told, "")[1] is at_limit


def test_a_job_that_was_cancelled_is_cancelled_however_it_ended(tmp_path: Path) -> None:
    of = job(tmp_path, state=State.STOPPING, stopping=Cause.CANCELLED)
    for ended in Ended:
        exit, _ = conclude(of, Sighting("1", "words", ended=ended, code=1), STOPPED, "")
        assert outcome(of, exit).state is State.CANCELLED


def test_a_launcher_that_kubernetes_ends_is_started_again(tmp_path: Path) -> None:
    """As where its node is drained."""
    of = job(tmp_path, engine=Engine.KUBERNETES)
    exit, _ = conclude(of, Sighting("1", "words", ended=Ended.EXITED, code=1), SIGNALLED, "")
    assert outcome(of, exit).state is State.QUEUED
