"""Batches of random tokens have the shapes that the model of each task takes."""

import math

import pytest
import torch

from hvd_transformer.bench.synthetic_task import SyntheticTask, samples_per_step
from hvd_transformer.bench.train import trainer_of
from hvd_transformer.comm.world import World
from hvd_transformer.config import Config, load
from hvd_transformer.data.sampler import Replica
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.planning.memory_plan import batch_samples

V, T, B = 50, 12, 6
SMALL = [
    "model.num_layers=2", "model.d_model=16", "model.num_heads=2", "model.d_feedforward=32", "training.device=cpu",
    f"data.sequence_length={T}", f"training.batch_size={B}",
]  # fmt: skip
TARGETS = {"language_model": B * T, "translation": B * T, "classification": B}


def small(*words: str) -> Config:
    return load(overrides=[*SMALL, *words])


@pytest.mark.parametrize("task", TARGETS)
def test_every_task_trains_without_data(task: str, one_thread: None) -> None:
    config = small(f"task={task}", "parallel.micro_batches=4", "training.accumulation=2")
    with trainer_of(config, V, World(), Heartbeat()) as trainer:
        assert trainer.task.targets_per_step == 2 * TARGETS[task]
        assert trainer.task.lookups_per_step == 2 * B * T
        results = [trainer.step(plan) for plan, _ in zip(trainer.task.sampler.epoch(), range(2), strict=False)]
    assert [result.totals.targets for result in results] == [2 * TARGETS[task]] * 2
    classes = 2 if task == "classification" else V
    assert results[0].totals.loss == pytest.approx(math.log(classes), abs=0.5)  # of a model that knows nothing


def test_tokens_are_of_the_vocabulary_and_differ_between_replicas() -> None:
    first, second = (SyntheticTask(small(), V, Replica(rank, 2)) for rank in range(2))
    (one,), (other,) = (task.micro_batch((torch.zeros(3),)).inputs for task in (first, second))
    assert one.shape == (3, T) and int(one.min()) >= 4 and int(one.max()) < V
    assert len(one.unique()) > 10 and not one.equal(other)


def test_samples_of_a_batch_and_of_a_step() -> None:
    assert batch_samples(small()) == B
    assert batch_samples(small("task=translation", f"data.batch_tokens={5 * T + 1}")) == 5
    assert samples_per_step(small("training.accumulation=3"), replicas=4) == 3 * 4 * B
    assert samples_per_step(small(f"training.global_batch_size={10 * B}"), replicas=4) == 10 * B
