"""What the loop asks of a task: its data, its layers, and batches. The rest of training is the same for all.

A task of one's own is a class that implements `Task`, or `ExampleTask` for samples that differ in
length; `task=package.module:Class` trains it (docs/own-task.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.config.batch_size import step_samples
from hvd_transformer.config.schema import Config
from hvd_transformer.data.batches import LengthBuckets, in_order
from hvd_transformer.data.build_once import PrepareContext as PrepareContext
from hvd_transformer.data.sampler import Intervals, Replica, StepPlan, StepSampler
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.nn.contracts import Layer, MicroBatch, TensorSplit
from hvd_transformer.tasks.metrics import perplexity

# A batch is a tuple of tensors whose first dimension counts the samples.
Batch = tuple[Tensor, ...]


def split_batch(batch: Batch, most: int) -> list[Batch]:
    """A round's micro-batches: at most so many, the last smaller where they do not divide it."""
    size = -(-batch[0].size(0) // most)
    return list(zip(*(tensor.split(size) for tensor in batch), strict=True))


class Sampler(Protocol):
    """Which units of an epoch this replica takes, step by step (`data.sampler`)."""

    def num_steps(self, remaining: Intervals | None = None) -> int: ...

    def epoch(self, remaining: Intervals | None = None) -> Iterator[StepPlan]: ...


class Data(Protocol):
    """What `Task.prepare` gives. `digest` is the same on all hosts that have the same data, whatever the paths."""

    @property
    def digest(self) -> str: ...

    def report(self) -> list[str]:
        """Lines for who prepared it."""
        ...


class EvaluationSpec(NamedTuple):
    """What `evaluate` is asked for, and what the checkpoint has for it."""

    split: str | None  # None: test where there is one, else valid
    path: Path | None  # another file or folder than the one trained on
    tokenizers: Mapping[str, Tokenizer]  # as `Task.tokenizers`
    state: Mapping[str, Any]  # the checkpoint's, with the task's facts


class ModelSketch(NamedTuple):
    """A model without data, the largest micro-batch of so many samples, and the weights that ranks may share: what can
    be known before there is a job."""

    model: nn.Module
    layers: Sequence[Layer]
    micro_batch: MicroBatch
    cuts: Mapping[str, TensorSplit]


class Task(ABC):
    """One kind of model and its data, as one replica sees it. The model is made on the default device, in the default
    type, from torch's own generator, so that it is the same on every rank."""

    unit: ClassVar[str] = "tokens"  # what `num_targets` counts

    model: nn.Module
    sampler: Sampler
    targets_per_step: int
    """Targets of a full step over all replicas: keeps gradients near their mean while they are summed."""

    def __init__(self, config: Config, data: Any, replica: Replica) -> None:
        self.config, self.data, self.replica = config, data, replica

    @classmethod
    @abstractmethod
    def prepare(cls, config: Config, context: PrepareContext) -> Data:
        """The data, made once on each host. Raises `UserError` where it cannot be used."""

    @classmethod
    def prepare_evaluation(cls, config: Config, context: PrepareContext, wanted: EvaluationSpec) -> Data:
        """The data of one split or file for a trained model, with its own tokenizers. The split is "data" where
        `wanted.path` is a file.

        A task that has no other way prepares all it was trained on. Raises `UserError` where that is not the same now.
        """
        if wanted.path is not None:
            raise UserError(
                f"--data {wanted.path}: task={config.task} has no `prepare_evaluation`, which could read it"
            )
        data = cls.prepare(config, context)
        if data.digest != wanted.state["data_digest"]:
            raise UserError(
                f"data.source={config.data.source}: is not what the checkpoint was trained on; was it changed?"
            )
        return data

    @abstractmethod
    def describe(self) -> str:
        """The data in a few words, for the screen."""

    @classmethod
    def layer_names(cls, config: Config) -> list[str] | None:
        """The names of `layers`, without a model; None: not known before there is one."""
        return None

    @classmethod
    def sketch(cls, config: Config, vocab_size: int, num_samples: int) -> ModelSketch:
        """For `plan`, whose tensors have no values. Raises `UserError` where nothing can be said without the data."""
        raise UserError(f"task={config.task}: cannot be planned; the class has no `sketch`")

    @property
    @abstractmethod
    def layers(self) -> Sequence[Layer]:
        """The whole model, in order; the last one returns the sum of the losses. In evaluation it may return a vector:
        that sum, and `num_sums` - 1 others that `metrics` needs."""

    @abstractmethod
    def batch(self, epoch: int, items: range) -> Batch:
        """The training samples of these units of the sampler."""

    @abstractmethod
    def has_split(self, split: str) -> bool:
        """Whether there is a "valid" or "test" split."""

    @abstractmethod
    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        """This replica's part of a whole split."""

    @abstractmethod
    def micro_batch(self, batch: Batch) -> MicroBatch:
        """A batch (or a part of one) as the layers take it."""

    @abstractmethod
    def num_targets(self, batch: Batch) -> int:
        """What the sum of the losses is divided by, for their mean."""

    num_sums: int = 1
    """Numbers that the last layer returns in evaluation."""

    def metrics(self, sums: Sequence[float], count: int) -> dict[str, float]:
        """The metrics of a whole split, from the sums over its samples and the number of its targets. "loss" is one."""
        return {"loss": sums[0] / count, "perplexity": perplexity(sums[0] / count)}

    @property
    def metric_names(self) -> list[str]:
        """Of `metrics` and `more_metrics`: what `training.best_metric` may be."""
        return list(self.metrics([1.0] * self.num_sums, 1))

    def more_metrics(self, split: str, group: Group) -> dict[str, float]:
        """Those that the loss has no part in, such as a translation's. The same on all ranks. Collective in the group
        of the replicas; the model is in evaluation."""
        return {}

    @property
    def notes(self) -> Sequence[str]:
        """Lines on the metrics for the end of a run."""
        return ()

    @property
    def cuts(self) -> Mapping[str, TensorSplit]:
        """The weights that the ranks of a tensor group share, and how: as the model says, if it does."""
        own: Callable[[bool], Mapping[str, TensorSplit]] | None = getattr(self.model, "cuts", None)
        return {} if own is None else own(self.config.parallel.vocab_parallel)

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """What a checkpoint needs to be of use, by the beginning of its file's name."""
        return {}

    @property
    def files(self) -> Mapping[str, str]:
        """Other texts that a checkpoint needs, by the file's name."""
        return {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """And what else: JSON."""
        return {}


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
        self.sampler, self.targets_per_step = StepSampler(0, 1, 1, replica), 1  # in evaluation alone: no steps
        if "train" in self.splits:
            self._begin_training()

    def _begin_training(self) -> None:
        config, training, replica = self.config, self.config.training, self.replica
        lengths = self.splits["train"].lengths
        self.batches = LengthBuckets(lengths, training.batch_size, config.data.batch_tokens, config.seed)
        units = -(-step_samples(training, replica.size) // training.batch_size)
        self.sampler = StepSampler(self.batches.num_items, units, 1, replica)
        self.targets_per_step = max(1, round(self.num_training_targets * units / self.batches.num_items))

    @abstractmethod
    def collate(self, split: str, numbers: NDArray[np.int64]) -> Batch:
        """These samples of a split as one batch."""

    @property
    def num_training_targets(self) -> int:
        """Of an epoch: as many as samples, unless a task says other."""
        return len(self.splits["train"].lengths)

    def batch(self, epoch: int, items: range) -> Batch:
        (item,) = items
        return self.collate("train", self.batches.item(epoch, item))

    def has_split(self, split: str) -> bool:
        return split in self.splits

    def evaluation_numbers(self, split: str) -> Iterator[NDArray[np.int64]]:
        """This replica's samples of a split, a batch at a time."""
        training = self.config.training
        size = training.eval_batch_size or training.batch_size
        return in_order(self.splits[split].lengths, size, self.config.data.batch_tokens, self.replica)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        return (self.collate(split, numbers) for numbers in self.evaluation_numbers(split))
