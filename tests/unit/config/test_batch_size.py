"""Samples per step and learning-rate scaling, which a fixed global batch makes independent of the replicas."""

import pytest
from small_job import settings

from hvd_transformer.config.batch_size import check_step_size, rate_replicas, step_samples
from hvd_transformer.errors import UserError


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7])
def test_a_fixed_size_does_not_depend_on_the_replicas(dp: int) -> None:
    grows = settings("training.batch_size=4", "training.accumulation=3").training
    assert (step_samples(grows, dp), rate_replicas(grows, dp)) == (12 * dp, dp)
    fixed = settings("training.batch_size=4", "training.global_batch_size=10").training
    assert (step_samples(fixed, dp), rate_replicas(fixed, dp)) == (10, 2.5)
    # Without accumulation both give the same.
    grows, fixed = (
        settings("training.batch_size=4", *words).training for words in ([], [f"training.global_batch_size={4 * dp}"])
    )
    assert step_samples(grows, dp) == step_samples(fixed, dp)
    assert rate_replicas(grows, dp) == rate_replicas(fixed, dp)


@pytest.mark.parametrize(
    ("words", "most", "named"),
    [
        (
            ["training.batch_size=2", "training.global_batch_size=3"],
            3,
            "training.global_batch_size=3: is enough for 3 ",
        ),
        (
            ["training.batch_size=4", "training.global_batch_size=8", "data.batching=columns"],
            2,
            "training.global_batch_size=8: is enough for 2 ranks of training.batch_size=4 columns each, not for 3",
        ),
    ],
)
def test_more_ranks_than_have_work_are_refused(words: list[str], most: int, named: str) -> None:
    check_step_size(settings(*words), most)
    with pytest.raises(UserError) as caught:
        check_step_size(settings(*words), most + 1)
    assert str(caught.value).startswith(named) and "\n" not in str(caught.value)
    check_step_size(settings(), 10**6)


def test_with_local_steps_the_rate_is_that_of_one_replica() -> None:
    grows = settings("training.batch_size=4", "training.accumulation=3").training
    fixed = settings("training.batch_size=4", "training.global_batch_size=24").training
    assert rate_replicas(grows, 3, local_steps=8) == 1
    assert rate_replicas(fixed, 3, local_steps=8) == 2  # 8 samples of its own are two accumulation steps of 4
    assert rate_replicas(grows, 1, local_steps=8) == rate_replicas(grows, 1)
