"""A slow rank is told once, with what it costs, and once when it is as fast as the others again."""

from hvd_transformer.training.stragglers import Stragglers


def judged(stragglers: Stragglers, *work: float, num_steps: int = 20) -> tuple[list[str], dict[str, float]]:
    """The warnings and the numbers after some steps with each rank's seconds of work."""
    for _ in range(num_steps):
        stragglers.add(work)
    warnings: list[str] = []
    return warnings, stragglers.judge(warnings.append)


def test_a_slow_rank_is_told_with_its_cost_and_once() -> None:
    stragglers = Stragglers(["h1", "h1", "h2", "h2"])
    told, numbers = judged(stragglers, 0.300, 0.290, 0.310, 0.412)
    assert told == [
        "rank 3 on host h2 is slow: 412 ms of work a step where the others need 300 ms; "
        "each step of the job waits 112 ms for it"
    ]
    assert {key: round(value, 6) for key, value in numbers.items()} == {
        "slowest_rank": 3, "slowest_work_milliseconds": 412, "others_work_milliseconds": 300,
    }  # fmt: skip
    assert judged(stragglers, 0.300, 0.290, 0.310, 0.500)[0] == []
    assert judged(stragglers, 0.300, 0.290, 0.310, 0.345)[0] == []  # 15 % is not fast again
    assert judged(stragglers, 0.300, 0.290, 0.310, 0.320)[0] == ["rank 3 on host h2 is no longer slow"]
    assert judged(stragglers, 0.300, 0.290, 0.310, 0.345)[0] == []  # nor slow again
    assert len(judged(stragglers, 0.600, 0.290, 0.310, 0.345)[0]) == 1


def test_one_long_step_makes_no_slow_rank() -> None:
    stragglers = Stragglers(["h1", "h2"])
    stragglers.add([0.3, 9.0])
    told, numbers = judged(stragglers, 0.3, 0.3)
    assert told == [] and numbers["slowest_work_milliseconds"] == 300


def test_few_or_short_steps_are_not_judged_yet() -> None:
    stragglers = Stragglers(["h1", "h2"])
    assert judged(stragglers, 0.5, 1.0, num_steps=9) == ([], {})
    assert len(judged(stragglers, 0.5, 1.0, num_steps=1)[0]) == 1
    quick = Stragglers(["h1", "h2"])
    assert judged(quick, 0.001, 0.010, num_steps=299) == ([], {})
    assert len(judged(quick, 0.001, 0.010, num_steps=2)[0]) == 1


def test_milliseconds_do_not_make_a_slow_rank() -> None:
    assert judged(Stragglers(["h1", "h2"]), 0.004, 0.008, num_steps=1000)[0] == []


def test_a_first_step_and_a_world_of_one_have_no_work_to_compare() -> None:
    assert judged(Stragglers(["h1", "h2"]), 0.0, 0.0) == ([], {})
    assert judged(Stragglers(["h1"]), 1.0) == ([], {})
