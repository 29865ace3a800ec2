"""Samples per step and learning-rate scaling, which a fixed global batch makes independent of the replicas."""

import math

import pytest
from small_job import settings

from hvd_transformer.config import load
from hvd_transformer.config.batch_size import (
    check_step_size,
    possible_batch_sizes,
    rate_replicas,
    step_samples,
    with_batch_size,
)
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
        (
            ["training.batch_size=4", "training.global_batch_size=10", "task=translation"],
            3,
            "training.global_batch_size=10: is enough for 3 ranks of training.batch_size=4 samples each, not for 4",
        ),
        (
            ["training.batch_size=8", "training.global_batch_size=8", "task=classification"],
            1,
            "training.global_batch_size=8: is enough for 1 ranks of training.batch_size=8 samples each, not for 2",
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


def test_a_run_that_resumes_with_another_batch_size_keeps_its_rate() -> None:
    fixed = settings("training.batch_size=2", "training.global_batch_size=24").training
    assert rate_replicas(fixed, 3, batch_size=4) == 6
    assert rate_replicas(fixed, 3, local_steps=8, batch_size=4) == 2
    assert rate_replicas(settings("training.batch_size=2").training, 3, batch_size=4) == 3


AUTO = ["training.batch_size=auto", "optimizer.lr_scaling=none"]


@pytest.mark.parametrize("total", [1, 7, 12, 64, 97])
@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_sizes_that_may_be_found_divide_a_replicas_part_evenly(total: int, dp: int) -> None:
    config = load(overrides=[*AUTO, f"training.global_batch_size={total}"])
    sizes, part = possible_batch_sizes(config, dp), math.ceil(total / dp)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == part
    for size in range(1, part + 1):
        steps = math.ceil(part / size)
        # None smaller takes as few accumulation steps.
        assert (size in sizes) == (size == 1 or math.ceil(part / (size - 1)) > steps)


def test_sizes_of_a_step_as_large_as_any() -> None:
    config = load(overrides=[*AUTO, f"training.global_batch_size={10**10}"])
    sizes = possible_batch_sizes(config, 1)
    assert len(sizes) < 2.1 * 10**5 and (sizes[0], sizes[-2], sizes[-1]) == (1, 5 * 10**9, 10**10)


def test_batches_of_examples_divide_the_whole_step() -> None:
    words = [*AUTO, "task=translation", "data.source=multi30k", "training.global_batch_size=96"]
    assert possible_batch_sizes(load(overrides=words), 1) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    assert possible_batch_sizes(load(overrides=[*words, "parallel.micro_batches=5"]), 4) == [6, 8, 12, 24]
    text = load(overrides=[*AUTO, "training.global_batch_size=7"])
    chat = text.model_copy(update={"data": text.data.model_copy(update={"messages_column": "messages"})})
    assert (possible_batch_sizes(text, 1), possible_batch_sizes(chat, 1)) == ([1, 2, 3, 4, 7], [1, 7])


def test_a_replica_has_samples_for_its_micro_batches() -> None:
    config = load(overrides=[*AUTO, "training.global_batch_size=12", "parallel.micro_batches=8"])
    with pytest.raises(UserError, match="parallel.micro_batches=8: more than the 6 samples that each of 2 replicas"):
        possible_batch_sizes(config, 2)


def test_a_size_that_is_not_found_yet_is_no_number() -> None:
    config = load(overrides=[*AUTO, "training.global_batch_size=12"])
    with pytest.raises(UserError, match="training.batch_size=auto: is found when a job starts"):
        _ = config.training.batch_samples
    assert with_batch_size(config, 6).training.batch_samples == 6
