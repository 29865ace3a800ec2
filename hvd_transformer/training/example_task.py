"""Tasks whose samples differ in length: batches of about the same length, each sample once an epoch."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import Config
from hvd_transformer.data.length_batches import LengthBatches, in_order
from hvd_transformer.data.sampler import Replica, WindowSampler
from hvd_transformer.training.step_size import step_samples
from hvd_transformer.training.task import Batch, Task


class Samples(Protocol):
    """The samples of a split."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of each sample, in tokens or whatever a batch is padded with (N,)."""
        ...


class ExampleTask(Task):
    """`data.splits` are `Samples` by name, and `collate` makes a batch of some of them.

    A unit of the sampler is a batch, so a round has `data.batch_tokens` or `training.batch_size` samples, and every
    rank has as many steps. With `training.global_batch_size` a step has as many batches as of `training.batch_size`.
    """

    def __init__(self, config: Config, data: Any, replica: Replica) -> None:
        super().__init__(config, data, replica)
        self.splits: Mapping[str, Samples] = data.splits
        self.sampler, self.usual_count = WindowSampler(0, 1, 1, replica), 1  # in evaluation alone: no steps
        if "train" in self.splits:
            self._begin_training()

    def _begin_training(self) -> None:
        config, training, replica = self.config, self.config.training, self.replica
        lengths = self.splits["train"].lengths
        self.batches = LengthBatches(lengths, training.batch_size, config.data.batch_tokens, config.seed)
        units = -(-step_samples(training, replica.size) // training.batch_size)
        self.sampler = WindowSampler(self.batches.num_units, units, 1, replica)
        self.usual_count = max(1, round(self.num_training_targets * units / self.batches.num_units))

    @abstractmethod
    def collate(self, split: str, numbers: NDArray[np.int64]) -> Batch:
        """These samples of a split as one batch."""

    @property
    def num_training_targets(self) -> int:
        """Of an epoch: as many as samples, unless a task says other."""
        return len(self.splits["train"].lengths)

    def batch(self, epoch: int, units: range) -> Batch:
        (unit,) = units
        return self.collate("train", self.batches.unit(epoch, unit))

    def has_split(self, split: str) -> bool:
        return split in self.splits

    def evaluation_numbers(self, split: str) -> Iterator[NDArray[np.int64]]:
        """This replica's samples of a split, a batch at a time."""
        training = self.config.training
        size = training.eval_batch_size or training.batch_size
        return in_order(self.splits[split].lengths, size, self.config.data.batch_tokens, self.replica)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        return (self.collate(split, numbers) for numbers in self.evaluation_numbers(split))
