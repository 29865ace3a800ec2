"""A job small enough for a unit test: a real task and trainer over tokens in memory."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from hvd_transformer.comm.world import World
from hvd_transformer.config import Config, load
from hvd_transformer.data.sampler import Replica
from hvd_transformer.data.tokenizers import CharTokenizer
from hvd_transformer.gradients.buffers import WHOLE, ZeroShard
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

VOCABULARY = 11
TOKENIZER = CharTokenizer(["<unk>", *"abcdefghij"])

SMALL = [
    "model.num_layers=1",
    "model.d_model=8",
    "model.num_heads=2",
    "model.d_feedforward=12",
    "model.max_length=16",
    "model.loss_chunk=7",
    "data.sequence_length=5",
    "data.tokenizer=char",
    "data.cache_dir=/dev/null",  # nothing is kept: a partition is measured each time
    "training.batch_size=4",
    "training.epochs=100",
    "training.max_steps=12",
    # The key biases have no gradient but rounding, which a smaller epsilon makes as large as any other.
    "optimizer.eps=1e-4",
    "optimizer.lr=0.05",
]


def tokens(count: int, seed: int = 0) -> np.ndarray:
    """A text with something to learn: mostly each token plus three."""
    generator = np.random.default_rng(seed)
    steps = np.where(generator.random(count) < 0.8, 3, generator.integers(0, VOCABULARY, count))
    return (np.cumsum(steps) % VOCABULARY).astype("<u2")


SPLITS = {"train": tokens(213), "valid": tokens(58, seed=1)}


def write_texts(folder: Path) -> Path:
    """train.txt, valid.txt and test.txt of words that repeat; returns the folder."""
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("to be or not to be that is the question \n" * 40, encoding="utf-8")
    return folder


def settings(*overrides: str) -> Config:
    without_eps = "optimizer.name=sgd" in overrides
    return load(overrides=[*(word for word in SMALL if not (without_eps and "eps" in word)), *overrides])


def trainer(
    config: Config,
    world: World | None = None,
    position: TrainState | None = None,
    replica: int = 0,
    zero_shard: ZeroShard = WHOLE,
) -> Trainer:
    """The job's trainer, its weights by the seed, on one of the world's ranks: replicas, or one tensor group."""
    world = world or World()
    alone, tensor = World(), config.parallel.tensor
    assert tensor in (1, world.size)
    data = SimpleNamespace(tokenizer=TOKENIZER, splits=SPLITS)
    task = LanguageModelTask(config, data, Replica(replica, world.size // tensor))
    layout = ParallelMesh(
        dp=world.size // tensor,
        tp=tensor,
        dp_rank=replica,
        tp_rank=0 if tensor == 1 else world.rank,
        devices=(torch.device("cpu"),) * config.parallel.pipeline,
        dp_group=world if tensor == 1 else alone,
        tp_group=alone if tensor == 1 else world,
        zero_shard=zero_shard,
    )
    return Trainer(config, world, layout, task, position or TrainState())


def run(job: Trainer, num_steps: int | None = None) -> list[float]:
    """Takes the next steps (None: all); the losses."""
    losses = []
    for plan in job.steps():
        losses.append(job.step(plan).totals.loss)
        if len(losses) == num_steps:
            break
    return losses


def weights(job: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in job.task.model.named_parameters()}
