"""How long jobs are thought to run, and which settings make no difference."""

import pytest

from hvd_transformer.config.schema import Config, flatten
from hvd_transformer.service.scheduling.run_length import (
    _WITHOUT_EFFECT,
    Pace,
    Steps,
    kind_of,
    median_length,
    seconds_left,
    steps_of,
)

CONFIG = flatten(Config())


@pytest.mark.parametrize(
    ("steps", "ranks", "done", "seconds"),
    [
        (Steps(None, False), 4, 0, 50.0),  # 100 steps of half a second
        (Steps(None, False), 4, 60, 20.0),
        (Steps(None, False), 2, 0, 100.0),  # an epoch has twice as many steps
        (Steps(None, True), 8, 0, 25.0),  # a step takes half as long
        (Steps(None, True), 2, 90, 10.0),
        (Steps(30, False), 2, 10, 10.0),
        (Steps(30, True), 2, 10, 20.0),
        (Steps(30, False), 4, 31, 0.0),
    ],
)
def test_steps_left_at_the_speed_of_others(steps: Steps, ranks: int, done: int, seconds: float) -> None:
    assert seconds_left(Pace(0.5, 100, 4), steps, ranks, done) == seconds


def test_an_unknown_number_of_steps() -> None:
    assert seconds_left(Pace(0.5, None, 4), Steps(None, False), 4, 0) is None


def test_all_settings_without_effect_are_settings() -> None:
    assert CONFIG.keys() >= _WITHOUT_EFFECT


@pytest.mark.parametrize(
    "changed",
    [{"seed": 7}, {"optimizer.lr": 3e-4}, {"output_dir": "/runs/x"}, {"checkpoint.resume": "never"}],
    ids=lambda changed: next(iter(changed)),
)
def test_jobs_that_run_alike(changed: dict[str, object]) -> None:
    assert kind_of("ann", {**CONFIG, **changed}) == kind_of("ann", CONFIG)


@pytest.mark.parametrize(
    "changed",
    [
        {"model.num_layers": 99},
        {"training.batch_size": 99},
        {"training.epochs": 9},
        {"data.source": "wikitext2"},
        {"optimizer.name": "sgd"},
        {"parallel.tensor": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_jobs_that_do_not(changed: dict[str, object]) -> None:
    assert kind_of("ann", {**CONFIG, **changed}) != kind_of("ann", CONFIG)
    assert kind_of("ben", CONFIG) != kind_of("ann", CONFIG)


def test_any_number_of_steps_but_not_none() -> None:
    """The total of a job without it tells nothing of one with it, and the other way round."""
    short, long = ({**CONFIG, "training.max_steps": steps} for steps in (10, 1000))
    assert kind_of("ann", short) == kind_of("ann", long) != kind_of("ann", CONFIG)
    assert steps_of(short) == Steps(10, False)
    assert steps_of({**CONFIG, "training.global_batch_size": 64}) == Steps(None, True)


def test_a_few_jobs_tell_nothing() -> None:
    assert median_length([60.0] * 9) is None
    assert median_length([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 100.0, 200.0]) == 6.0
