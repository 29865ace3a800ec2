"""A slow rank is reported once, with its cost; afterwards only lasting changes are, not the noise of a busy machine."""

import itertools
import random

from hvd_transformer.monitoring.stall_report import Stragglers

SLOW = (
    "rank {} on host {} is slow: {} ms of work per step, the others need {} ms; "
    "every step of the job waits {} ms for it"
)


def judged(stragglers: Stragglers, *work: float, num_steps: int = 20) -> tuple[list[str], dict[str, float]]:
    """The warnings and the numbers after some steps with each rank's seconds of work."""
    for _ in range(num_steps):
        stragglers.add(work[0], max(work))
    warnings: list[str] = []
    if not stragglers.due:
        return warnings, {}
    assert stragglers.take_work() == work[0]
    return warnings, stragglers.judge(work, warnings.append)


def told(stragglers: Stragglers, *work: float, seconds: float) -> list[tuple[str, float]]:
    """The warnings in this many seconds of steps, judged every ten, each with its time in seconds."""
    found: list[tuple[str, float]] = []
    lasted = 0.0
    while lasted < seconds:
        lasted += 10 * max(work)
        found += [(line, lasted) for line in judged(stragglers, *work, num_steps=10)[0]]
    return found


def test_a_slow_rank_is_told_at_once_with_its_cost_and_once() -> None:
    stragglers = Stragglers(["h1", "h1", "h2", "h2"])
    warnings, numbers = judged(stragglers, 0.300, 0.290, 0.310, 0.412)
    assert warnings == [SLOW.format(3, "h2", 412, 300, 112)]
    assert {key: round(value, 6) for key, value in numbers.items()} == {
        "slowest_rank": 3, "slowest_work_milliseconds": 412, "others_work_milliseconds": 300,
    }  # fmt: skip
    assert told(stragglers, 0.300, 0.290, 0.310, 0.412, seconds=10_000) == []
    assert told(stragglers, 0.300, 0.290, 0.310, 0.900, seconds=10_000) == []
    assert told(stragglers, 0.300, 0.290, 0.310, 0.345, seconds=10_000) == []  # 15 % is not fast again


def test_a_rank_that_recovers_for_good_is_told_after_half_a_minute() -> None:
    stragglers = Stragglers(["h1", "h1", "h2", "h2"])
    judged(stragglers, 0.300, 0.290, 0.310, 0.412)
    ((line, after),) = told(stragglers, 0.300, 0.290, 0.310, 0.320, seconds=10_000)
    assert line == "rank 3 on host h2 is no longer slow"
    assert 30 <= after < 40
    assert told(stragglers, 0.300, 0.290, 0.310, 0.345, seconds=10_000) == []  # 15 % is not slow again
    ((line, after),) = told(stragglers, 0.600, 0.290, 0.310, 0.345, seconds=10_000)
    assert line.startswith("rank 0 on host h1 is slow: 600 ms")
    assert 60 <= after < 75  # each line has the next change last longer


def test_another_rank_that_becomes_slow_for_good_is_told_too() -> None:
    stragglers = Stragglers(["h1", "h1", "h2"])
    judged(stragglers, 0.3, 0.3, 0.6)
    ((line, after),) = told(stragglers, 0.3, 0.5, 0.3, seconds=10_000)
    assert line == SLOW.format(1, "h1", 500, 300, 200)
    assert 30 <= after < 40


def test_verdicts_that_alternate_are_told_once() -> None:
    """As two ranks on a busy machine: now one is slow, now none, now the other."""
    stragglers = Stragglers(["h1", "h2"])
    every = itertools.islice(itertools.cycle([(0.3, 0.4), (0.3, 0.3), (0.3, 0.3), (0.4, 0.3), (0.3, 0.3)]), 5000)
    warnings = [line for work in every for line in judged(stragglers, *work)[0]]
    assert warnings == [SLOW.format(1, "h2", 400, 300, 100)]


def test_noise_of_any_kind_brings_few_lines() -> None:
    """Ten hours of random verdicts, of two and eight ranks: at most one line per hour after the first few."""
    for num_ranks in (2, 8):
        rng = random.Random(num_ranks)
        stragglers = Stragglers(["h"] * num_ranks)
        warnings: list[str] = []
        for _ in range(6000):
            warnings += judged(stragglers, *(rng.uniform(0.25, 0.45) for _ in range(num_ranks)))[0]
        assert 1 <= len(warnings) <= 12


def test_a_rank_that_recovered_is_told_though_others_are_slow_now_and_then() -> None:
    stragglers = Stragglers(["h1", "h1", "h2"])
    judged(stragglers, 0.3, 0.3, 0.6)
    now_and_then = itertools.islice(itertools.cycle([(0.3, 0.6, 0.3), (0.3, 0.3, 0.3)]), 10)
    warnings = [line for work in now_and_then for line in judged(stragglers, *work)[0]]
    assert warnings == ["rank 2 on host h2 is no longer slow"]


def test_a_log_line_of_many_steps_is_one_verdict() -> None:
    """However long it took to come: the next one has to agree."""
    stragglers = Stragglers(["h1", "h2"])
    assert len(judged(stragglers, 0.3, 0.6, num_steps=2000)[0]) == 1
    assert judged(stragglers, 0.3, 0.3, num_steps=2000)[0] == []
    assert judged(stragglers, 0.3, 0.6, num_steps=2000)[0] == []
    assert judged(stragglers, 0.3, 0.3, num_steps=2000)[0] == []
    assert len(judged(stragglers, 0.3, 0.3, num_steps=2000)[0]) == 1


def test_one_long_step_makes_no_slow_rank() -> None:
    stragglers = Stragglers(["h1", "h2"])
    stragglers.add(9.0, 9.0)
    warnings, numbers = judged(stragglers, 0.3, 0.3)
    assert warnings == [] and numbers["slowest_work_milliseconds"] == 300


def test_only_the_first_rank_asks_for_a_judgement() -> None:
    for rank in (0, 1):
        stragglers = Stragglers(["h1", "h2"], rank)
        for _ in range(20):
            stragglers.add(0.3, 0.4)
        assert stragglers.due == (rank == 0)
        assert stragglers.take_work() == 0.3
        assert not stragglers.due


def test_few_or_short_steps_are_not_judged_yet() -> None:
    stragglers = Stragglers(["h1", "h2"])
    assert judged(stragglers, 0.5, 1.0, num_steps=9) == ([], {})
    assert len(judged(stragglers, 0.5, 1.0, num_steps=1)[0]) == 1
    quick = Stragglers(["h1", "h2"])
    assert judged(quick, 0.001, 0.010, num_steps=299) == ([], {})
    assert len(judged(quick, 0.001, 0.010, num_steps=2)[0]) == 1


def test_milliseconds_do_not_make_a_slow_rank() -> None:
    assert judged(Stragglers(["h1", "h2"]), 0.004, 0.008, num_steps=1000)[0] == []


def test_a_world_of_one_has_no_work_to_compare() -> None:
    assert judged(Stragglers(["h1"]), 1.0) == ([], {})
