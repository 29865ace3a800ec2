"""What becomes of a job after an attempt."""

from dataclasses import replace

import pytest

from hvd_transformer.service.jobs import Cause, Job, Needs, State
from hvd_transformer.service.outcome import Exit, not_started, outcome

JOB = Job(1, "job", "ann", State.RUNNING, 0, 0.0, Needs(2, 2), "/runs/1", "/work", ())
LOST = Exit(1, "host h2 was lost", 70, {}, ["h2"])


@pytest.mark.parametrize(
    ("ended", "state", "retry"),
    [
        (Exit(0), State.SUCCEEDED, False),
        (Exit(1, "rank 1 on host h1 failed first"), State.FAILED, False),
        (Exit(2, "model.d_model=7: must be a multiple of model.num_heads=2"), State.FAILED, False),
        (Exit(75, "it stalled"), State.QUEUED, True),
        (LOST, State.QUEUED, True),
        (Exit(None), State.QUEUED, True),
        (Exit(2, "host h2: cannot be reached", None, {"h2": "host h2: cannot be reached"}), State.QUEUED, False),
        (not_started("the service ended"), State.QUEUED, False),
        (Exit(1, "it was asked to stop", 70, stopped="SIGTERM"), State.QUEUED, False),
        (Exit(1, "it was asked to stop", 70, {}, ["h2"], stopped="SIGTERM"), State.QUEUED, False),
        (Exit(1, "it was asked to stop", 70, stopped="request"), State.CANCELLED, False),
        (Exit(1, "it was asked to stop", 70, {"h2": "has no data"}, stopped="request"), State.CANCELLED, False),
        (Exit(0, "it was asked to stop", 70, stopped="SIGTERM"), State.SUCCEEDED, False),
    ],
    ids=[
        "done",
        "error",
        "wrong input",
        "stall",
        "lost host",
        "killed launcher",
        "refused host",
        "never started",
        "reboot of this machine",
        "reboot that also ended the connections",
        "hvd-transformer stop",
        "hvd-transformer stop while it waits for hosts",
        "done just before a reboot",
    ],
)
def test_what_is_tried_again(ended: Exit, state: State, retry: bool) -> None:
    found = outcome(JOB, ended)
    assert (found.state, found.retry) == (state, retry)
    assert state is State.SUCCEEDED or found.reason


def test_retries_end() -> None:
    assert outcome(replace(JOB, retries=2), LOST).reason == "retry 3 of 3: host h2 was lost"
    found = outcome(replace(JOB, retries=3), LOST)
    assert (found.state, found.reason) == (State.FAILED, "host h2 was lost; gave up after 3 retries")


@pytest.mark.parametrize(
    ("cause", "state"),
    [
        (Cause.CANCELLED, State.CANCELLED),
        (Cause.KILLED, State.CANCELLED),
        (Cause.PREEMPTED, State.QUEUED),
        (Cause.HELD, State.HELD),
        (Cause.TIME_LIMIT, State.FAILED),
    ],
)
@pytest.mark.parametrize(
    "ended",
    [Exit(1), LOST, Exit(None), not_started("the service ended")],
    ids=["saved", "lost", "killed", "never started"],
)
def test_a_stopped_job_becomes_what_it_was_stopped_for(cause: Cause, state: State, ended: Exit) -> None:
    found = outcome(replace(JOB, state=State.STOPPING, stopping=cause, time_limit=60.0), ended)
    assert (found.state, found.retry) == (state, False)


def test_a_job_that_is_done_before_it_is_stopped_has_succeeded() -> None:
    assert outcome(replace(JOB, stopping=Cause.CANCELLED), Exit(0)).state is State.SUCCEEDED
