"""Which rank failed first and which host is at fault, by made-up failures and heartbeats."""

from typing import Any

import pytest

from hvd_transformer.errors import STALLED
from hvd_transformer.launch.agents import Failure
from hvd_transformer.launch.root_cause import in_words, root_cause

BUCKET = "bucket 0"


def beat(rank: int, waits_for: str | None, age: float = 0.4) -> dict[str, Any]:
    known = {"rank": rank, "host": f"node-{rank}", "given_host": f"h{rank}"}
    return {**known, "waits_for": waits_for, "age": age, "limit_seconds": 30.0}


def exited(rank: int, code: int) -> Failure:
    return Failure(float(rank), rank, code, f"node-{rank}", f"h{rank}")


def cause(failures: list[Failure], *beats: dict[str, Any]) -> tuple[int | None, str | None]:
    found = root_cause(failures, {beat["rank"]: beat for beat in beats}, lambda beat: beat["age"] > 20)
    return None if found.first is None else found.first.rank, found.host


def test_a_rank_that_exits_is_the_cause_whatever_the_others_wait_for() -> None:
    assert cause([exited(1, 137), exited(0, 1)], beat(0, None), beat(1, BUCKET)) == (1, "h1")
    assert cause([], beat(0, None)) == (None, None)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (beat(0, None), beat(1, BUCKET), (0, "h0")),  # it hangs in its own code
        (beat(0, None), beat(1, BUCKET, age=40.0), (1, "h1")),  # it may be in an evaluation
        (beat(0, BUCKET), beat(1, None), (1, "h1")),  # it waits for one that hangs
        (beat(0, BUCKET), beat(1, BUCKET, age=40.0), (1, "h1")),  # or whose process is stopped
        (beat(0, BUCKET), beat(1, BUCKET), (0, None)),  # each waits for the other: the link may be at fault
        (beat(0, BUCKET), beat(1, BUCKET, age=25.0), (1, "h1")),  # within its limit, but without a heartbeat
    ],
)
def test_a_rank_without_a_step_waited_for_the_late_one(
    own: dict[str, Any], other: dict[str, Any], expected: tuple[int, str | None]
) -> None:
    assert cause([exited(0, STALLED)], own, other) == expected


def test_a_silent_rank_is_the_cause_and_not_those_that_work() -> None:
    """In an evaluation no rank waits for another: to work is not to be late."""
    beats = beat(0, None), beat(1, None), beat(2, None, age=25.0)
    assert cause([], *beats) == (2, "h2")
    assert cause([exited(0, STALLED)], *beats) == (2, "h2")


def test_the_cause_in_words() -> None:
    assert in_words(exited(1, 137), {}) == "rank 1 on host node-1 failed first, with exit code 137 (SIGKILL)"
    assert in_words(exited(1, 255), {}) == "rank 1 on host node-1 failed first, with exit code 255"
    assert in_words(None, {}) == "horovodrun failed"
    assert in_words(exited(1, 1), {"h2": "timed out", "h3": ""}) == "host h2 is lost: timed out; host h3 is lost"
