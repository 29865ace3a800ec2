"""How long a run still takes."""

import pytest

from hvd_transformer.service.runs import pace as module
from hvd_transformer.service.runs.pace import Pace


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(module.time, "time", lambda: clock[0])
    return clock


def test_by_the_speed_in_the_line_at_first(now: list[float]) -> None:
    pace = Pace()
    assert pace.seconds_left(100) is None
    pace.saw(0.0, 10, 200.0)
    assert pace.seconds_left(100) == pytest.approx(18.0)
    assert pace.seconds_left(None) is None
    pace.saw(0.0, 10, None)
    assert pace.seconds_left(100) == pytest.approx(18.0)


def test_by_the_time_that_passed_once_it_was_seen_for_long_enough(now: list[float]) -> None:
    pace = Pace()
    for number in range(11):  # a line every 6 s: with evaluations it takes three times as long
        pace.saw(6.0 * number, 10 * number, 200.0)
    now[0] = 60.0
    assert pace.seconds_per_step() == pytest.approx(0.6)
    assert pace.seconds_left(200) == pytest.approx(60.0)
    now[0] = 63.0
    assert pace.seconds_left(200) == pytest.approx(57.0)
    now[0] = 600.0  # it hangs: no more than the next line is taken for granted
    assert pace.seconds_left(200) == pytest.approx(54.0)


def test_only_the_last_minutes_count(now: list[float]) -> None:
    pace = Pace()
    for number in range(1000):
        pace.saw(6.0 * number, number, None)
    for number in range(1000, 1200):
        pace.saw(6000 + 60.0 * (number - 1000), number, None)
    assert pace.seconds_per_step() == pytest.approx(60.0)


def test_a_new_start_begins_anew(now: list[float]) -> None:
    pace = Pace()
    for number in range(10):
        pace.saw(10.0 * number, 100 + number, 100.0)
    pace.saw(1000.0, 50, 300.0)
    assert pace.seconds_left(60) is not None
    assert pace.seconds_per_step() == pytest.approx(0.3)
    assert pace.seconds_left(40) == 0.0
