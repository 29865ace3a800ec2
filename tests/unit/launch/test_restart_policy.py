"""When a failed job starts again and which hosts it leaves out, by made-up failures and clocks."""

from collections.abc import Mapping

import pytest

from hvd_transformer.errors import STALLED, WRONG_INPUT
from hvd_transformer.launch.agents import Failure
from hvd_transformer.launch.attempt import AttemptResult
from hvd_transformer.launch.restart_policy import Limits, RestartPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def failed(step: int, host: str = "h1", code: int = 1, lost: Mapping[str, str] | None = None) -> AttemptResult:
    """A start whose ranks made `step` steps (none: 0), then failed on `host`."""
    beats = {0: {"step": step, "loss": 2.5 if step else None}}
    first = None if lost else Failure(0.0, 0, code, host, host)
    return AttemptResult(code, first, lost or {}, False, beats, "", at_fault=None if lost else host)


def judge(policy: RestartPolicy, ended: AttemptResult, *replaceable: str) -> tuple[str | None, list[str]]:
    """Why it gives up (None: it does not), and the hosts at fault."""
    verdict = policy.judge(ended, replaceable=replaceable.__contains__)
    return verdict.give_up, list(verdict.at_fault)


def test_the_time_counts_from_the_first_failure_after_the_last_new_step() -> None:
    clock = Clock()
    policy = RestartPolicy(Limits(100, 60.0), clock)
    clock.now += 10_000  # of healthy training
    assert judge(policy, failed(50)) == (None, [])
    clock.now += 59
    assert policy.out_of_time() is None
    assert judge(policy, failed(50, "h2")) == (None, [])  # no new step
    clock.now += 2
    assert policy.out_of_time() == "giving up: no new step for 60 s after a failure (--give-up-after)"
    assert judge(policy, failed(51, "h3")) == (None, [])  # a new one
    clock.now += 59
    assert policy.judge_lost_host().give_up is None
    clock.now += 2
    assert "no new step for 60 s" in str(policy.judge_lost_host().give_up)


def test_a_lost_host_counts_as_a_restart() -> None:
    policy = RestartPolicy(Limits(2, 60.0))
    assert judge(policy, failed(5, lost={"h2": "gone"})) == (None, ["h2"])
    assert policy.judge_lost_host().give_up is None
    assert policy.judge_lost_host().give_up == "giving up after 2 restarts"


def test_wrong_input_ends_the_job_until_it_has_made_a_step() -> None:
    policy = RestartPolicy(Limits(9, 60.0))
    assert judge(policy, failed(0, "h2", WRONG_INPUT), "h2") == ("", [])
    policy = RestartPolicy(Limits(9, 60.0))
    assert judge(policy, failed(7, "h1", 1), "h1", "h2") == (None, [])
    assert judge(policy, failed(0, "h2", WRONG_INPUT), "h1", "h2") == (None, ["h2"])
    assert judge(policy, failed(0, "h2", WRONG_INPUT), "h1") == ("", [])  # the job needs h2


@pytest.mark.parametrize("code", [1, 137, STALLED])
def test_a_host_that_fails_first_again_is_at_fault_if_it_can_be_replaced(code: int) -> None:
    policy = RestartPolicy(Limits(9, 60.0))
    assert judge(policy, failed(5, "h2", code), "h1", "h2") == (None, [])
    assert judge(policy, failed(9, "h1", code), "h1", "h2") == (None, [])
    assert judge(policy, failed(9, "h2", code), "h1", "h2") == (None, [])
    assert judge(policy, failed(12, "h2", code), "h1") == (None, [])
    assert judge(policy, failed(15, "h2", code), "h1", "h2") == (None, ["h2"])


def test_the_back_off_grows_while_no_step_is_new() -> None:
    policy = RestartPolicy(Limits(99, 1e9))
    pauses = [
        policy.judge(failed(5, f"h{at}", lost={"h": ""}), replaceable=lambda _: False).back_off for at in range(9)
    ]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_no_host_is_set_aside_where_it_is_not_known_which_is_at_fault() -> None:
    policy = RestartPolicy(Limits(9, 60.0))
    stalled = failed(5, code=STALLED)._replace(at_fault=None)
    assert judge(policy, stalled, "h1", "h2") == (None, [])
    assert judge(policy, stalled, "h1", "h2") == (None, [])


def test_the_time_begins_anew_when_a_start_that_was_asked_to_end_made_steps() -> None:
    """As when a host that is about to end is left."""
    clock = Clock()
    policy = RestartPolicy(Limits(9, 60.0), clock)
    assert judge(policy, failed(100)) == (None, [])
    clock.now += 172_800
    policy.note_steps(AttemptResult(1, None, {}, True, {0: {"step": 9000, "loss": 2.5}}, ""))
    assert policy.out_of_time() is None
    assert policy.judge_lost_host().give_up is None


def test_the_time_counts_from_a_stop_too() -> None:
    """A host that has left may not come back."""
    clock = Clock()
    policy = RestartPolicy(Limits(9, 60.0), clock)
    left = AttemptResult(1, None, {}, True, {0: {"step": 9, "loss": 2.5}}, "", {"h2": "host h2 is about to end"})
    policy.note_stop(left)
    clock.now += 59
    assert policy.out_of_time() is None
    policy.note_stop(left)  # no new step
    clock.now += 2
    assert policy.out_of_time() == "giving up: no new step for 60 s after a failure (--give-up-after)"
    policy.note_stop(left._replace(beats={0: {"step": 10, "loss": 2.5}}))
    clock.now += 59
    assert policy.out_of_time() is None


def test_a_failure_of_another_cause_ends_the_row() -> None:
    policy = RestartPolicy(Limits(9, 60.0))
    assert judge(policy, failed(5, "h1"), "h1") == (None, [])
    assert judge(policy, failed(7, lost={"h2": "gone"}), "h1") == (None, ["h2"])
    assert judge(policy, failed(9, "h1"), "h1") == (None, [])
    assert judge(policy, failed(11, "h1"), "h1") == (None, ["h1"])
