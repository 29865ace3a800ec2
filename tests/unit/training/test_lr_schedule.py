"""Learning rates against their closed forms and torch's own schedulers."""

import math
from typing import get_args

import pytest
import torch
from torch import nn

from hvd_transformer.config.load import load, preset_names
from hvd_transformer.config.schema import OptimizerConfig
from hvd_transformer.training.lr_schedule import learning_rate, peak_rate, scaling_warning

SCHEDULES = get_args(OptimizerConfig.model_fields["schedule"].annotation)


def config(**values: object) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 0.4, "gamma": 0.1, **values})


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 9.0), ("sqrt", 3.0), ("none", 1.0)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_grows_with_the_replicas_as_asked(scaling: str, factor: float, schedule: str) -> None:
    one = config(lr_scaling=scaling, schedule=schedule, warmup_steps=3)
    assert peak_rate(one, 9) == pytest.approx(0.4 * factor)
    for step in range(12):
        alone, nine = (learning_rate(one, dp, step, step // 4, 12) for dp in (1, 9))
        assert nine == pytest.approx(alone * factor)


def torch_rates(scheduler: type, num_steps: int, **options: object) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    made = scheduler(optimizer, **options)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return rates


def test_step_is_torchs_steplr_with_one_decay_an_epoch() -> None:
    expected = torch_rates(torch.optim.lr_scheduler.StepLR, 20, step_size=4, gamma=0.95)
    own = [learning_rate(config(schedule="step", gamma=0.95), 1, step, step // 4, 20) for step in range(20)]
    assert own == pytest.approx(expected, rel=1e-12)


def test_a_step_may_be_several_epochs() -> None:
    expected = torch_rates(torch.optim.lr_scheduler.StepLR, 40, step_size=12, gamma=0.5)
    chosen = config(schedule="step", gamma=0.5, step_epochs=3)
    assert [learning_rate(chosen, 1, step, step // 4, 40) for step in range(40)] == pytest.approx(expected, rel=1e-12)


def test_cosine_is_torchs_annealing() -> None:
    expected = torch_rates(torch.optim.lr_scheduler.CosineAnnealingLR, 50, T_max=50, eta_min=0.04)
    own = [learning_rate(config(schedule="cosine"), 1, step, 0, 50) for step in range(50)]
    assert own == pytest.approx(expected, rel=1e-9)


def test_cosine_starts_at_the_peak_after_warm_up_and_ends_at_its_share() -> None:
    made = config(schedule="cosine", warmup_steps=10)
    assert learning_rate(made, 1, 10, 0, 110) == pytest.approx(0.4)
    assert learning_rate(made, 1, 60, 0, 110) == pytest.approx((0.4 + 0.04) / 2)
    assert learning_rate(made, 1, 110, 0, 110) == pytest.approx(0.04)
    # A job that goes on longer than was planned stays at the end's rate.
    assert learning_rate(made, 1, 500, 0, 110) == pytest.approx(0.04)


def test_linear_is_torchs_down_to_zero() -> None:
    expected = torch_rates(torch.optim.lr_scheduler.LinearLR, 50, start_factor=1.0, end_factor=0.0, total_iters=50)
    own = [learning_rate(config(schedule="linear"), 1, step, 0, 50) for step in range(50)]
    assert own == pytest.approx(expected, rel=1e-9)
    # After a warm-up over the steps that are left, whatever gamma is.
    warm = config(schedule="linear", warmup_steps=10)
    assert [learning_rate(warm, 1, step, 0, 50) for step in (10, 30, 49, 50, 99)] == pytest.approx(
        [0.4, 0.2, 0.4 / 40, 0, 0]
    )


def test_wsd_is_stable_and_then_falls_like_one_minus_the_root() -> None:
    made = config(schedule="wsd", warmup_steps=10, decay_fraction=0.25)
    own = [learning_rate(made, 1, step, 0, 200) for step in range(200)]
    assert own[:10] == pytest.approx([0.04 * step for step in range(1, 11)])
    assert set(own[10:150]) == {0.4}
    assert own[150:] == pytest.approx([0.4 * (1 - ((step - 150) / 50) ** 0.5) for step in range(150, 200)])
    # A job that goes on longer than was planned stays at the end's rate; one that is all decay begins after warm-up.
    assert learning_rate(made, 1, 300, 0, 200) == 0
    whole = config(schedule="wsd", warmup_steps=10, decay_fraction=1)
    assert [learning_rate(whole, 1, step, 0, 110) for step in (9, 10, 35)] == pytest.approx([0.4, 0.4, 0.2])


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {"step"}))
def test_warm_up_is_a_straight_line_to_the_peak(schedule: str) -> None:
    made = config(schedule=schedule, warmup_steps=8)
    rates = [learning_rate(made, 1, step, 0, 100) for step in range(8)]
    assert rates == pytest.approx([0.4 * step / 8 for step in range(1, 9)])


def test_warm_up_over_an_epochs_end_is_decayed_too() -> None:
    made = config(schedule="step", warmup_steps=8, gamma=0.5)
    assert [learning_rate(made, 1, step, step // 4, 100) for step in (3, 4, 7, 8)] == pytest.approx(
        [0.4 * 4 / 8, 0.4 * 5 / 8 / 2, 0.4 / 2, 0.4 / 4]
    )


def test_noam_is_the_papers_up_to_a_factor() -> None:
    made = config(schedule="noam", warmup_steps=16)
    own = [learning_rate(made, 1, step, 0, 100) for step in range(100)]
    paper = [512**-0.5 * min(number**-0.5, number * 16**-1.5) for number in range(1, 101)]
    factor = 0.4 / max(paper)
    assert own == pytest.approx([factor * rate for rate in paper])
    assert max(own) == own[15] == pytest.approx(0.4)


def test_constant_stays_and_needs_no_number_of_steps() -> None:
    assert {learning_rate(config(schedule="constant"), 1, step, step, 1) for step in (0, 5, 10**6)} == {0.4}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 5])
def test_a_job_shorter_than_its_warm_up_has_rates_too(schedule: str, total: int) -> None:
    made = config(schedule=schedule, warmup_steps=5)
    rates = [learning_rate(made, 1, step, 0, total) for step in range(total)]
    assert all(math.isfinite(rate) and 0 < rate <= 0.4 for rate in rates)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_at_a_linearly_scaled_rate_from_the_first_step_is_told_what_to_change(name: str) -> None:
    warning = scaling_warning(config(name=name), 8)
    assert warning is not None and "\n" not in warning
    assert all(part in warning for part in (name, "3.2", "optimizer.lr_scaling=sqrt", "optimizer.warmup_steps"))
    assert scaling_warning(config(name=name), 7) is None
    for other in ({"name": "sgd"}, {"lr_scaling": "sqrt"}, {"lr_scaling": "none"}, {"warmup_steps": 1}):
        assert scaling_warning(config(**{"name": name, **other}), 64) is None


@pytest.mark.parametrize("preset", preset_names())
def test_no_preset_starts_too_fast_on_many_replicas(preset: str) -> None:
    assert scaling_warning(load(preset).optimizer, 64) is None
