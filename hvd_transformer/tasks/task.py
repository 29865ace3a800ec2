"""The interface of a task: its data, its layers and its batches. The rest of training is the same for all tasks.

A user-defined task is a subclass of `Task`, or of `ExampleTask` for samples that differ in length;
`task=package.module:Class` trains it (docs/own-task.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.config.batch_size import eval_samples, step_samples
from hvd_transformer.config.schema import Config
from hvd_transformer.data.batches import LengthBuckets, dealt_batches
from hvd_transformer.data.build_once import PrepareContext as PrepareContext
from hvd_transformer.data.length_order import LengthOrder
from hvd_transformer.data.sampler import Intervals, Replica, StepPlan, StepSampler
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.nn.contracts import Layer, MicroBatch, TensorSplit
from hvd_transformer.tasks.metrics import loss_metrics

# A batch is a tuple of tensors whose first dimension is the sample.
Batch = tuple[Tensor, ...]


def split_batch(batch: Batch, most: int) -> list[Batch]:
    """Split the batch of an accumulation step into at most `most` micro-batches; the last one may be smaller."""
    size = -(-batch[0].size(0) // most)
    return list(zip(*(tensor.split(size) for tensor in batch), strict=True))


class Sampler(Protocol):
    """Which items of an epoch this replica takes in each step (see `data.sampler`)."""

    def num_steps(self, remaining: Intervals | None = None) -> int: ...

    def epoch(self, remaining: Intervals | None = None, epoch: int = 0) -> Iterator[StepPlan]: ...


class Data(Protocol):
    """What `Task.prepare` returns. `digest` is equal on all hosts that have the same data, independent of paths."""

    @property
    def digest(self) -> str: ...

    def report(self) -> list[str]:
        """Lines that describe the data to whoever prepared it."""
        ...


class EvaluationSpec(NamedTuple):
    """What to evaluate, and what the checkpoint holds for it."""

    split: str | None  # None: test if there is one, else valid
    path: Path | None  # a file or folder other than the training data
    tokenizers: Mapping[str, Tokenizer]  # as `Task.tokenizers`
    state: Mapping[str, Any]  # the state of the checkpoint, with `Task.facts`


class ModelSketch(NamedTuple):
    """What is known of a model without data: its layers, its largest micro-batch, and how tensor parallelism may split
    its weights."""

    model: nn.Module
    layers: Sequence[Layer]
    micro_batch: MicroBatch
    cuts: Mapping[str, TensorSplit]


class Task(ABC):
    """One kind of model and its data, as one replica sees it."""

    unit: ClassVar[str] = "tokens"  # the unit of `num_targets`

    sampler: Sampler
    targets_per_step: int
    """Targets of a full step over all replicas. Losses are divided by it before backward, which keeps the sums of
    gradients near their mean."""

    def __init__(self, config: Config, data: Any, replica: Replica) -> None:
        self.config, self.data, self.replica = config, data, replica
        self.tick: Callable[[], object] = lambda: None
        """Call it now and then in long work, so that the watchdog sees progress. `evaluation_numbers` does."""

    @classmethod
    @abstractmethod
    def prepare(cls, config: Config, context: PrepareContext) -> Data:
        """Prepare the data, once on each host. Raises `UserError` if the data cannot be used."""

    @classmethod
    def prepare_evaluation(cls, config: Config, context: PrepareContext, wanted: EvaluationSpec) -> Data:
        """Prepare one split or file for a trained model, with the model's tokenizers. If `wanted.path` is a file, the
        split is named "data".

        The default prepares all of the training data. Raises `UserError` if it has changed since training.
        """
        if wanted.path is not None:
            raise UserError(
                f"--data {wanted.path}: the class of task={config.task} does not implement `prepare_evaluation`"
            )
        data = cls.prepare(config, context)
        if data.digest != wanted.state["data_digest"]:
            raise UserError(
                f"data.source={config.data.source}: is not the data that the checkpoint was trained on; was it changed?"
            )
        return data

    def make_model(self) -> nn.Module:
        """The whole model with its initial weights, on the CPU, in the default dtype, from torch's global generator.

        It is called while weights from `torch.empty` have no values yet (`parallel.deferred_init`), so that a rank of a
        tensor group never holds the whole model. A model that uses their values while it is built is built again.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `make_model`")

    @cached_property
    def model(self) -> nn.Module:
        """Made at first use. A class may also set it in `__init__`; then it is whole on every rank at first."""
        return self.make_model()

    @abstractmethod
    def describe(self) -> str:
        """A short description of the data, for the screen."""

    @classmethod
    def layer_names(cls, config: Config) -> list[str] | None:
        """The names of `layers`, without a model; None if they are not known before there is one."""
        return None

    @classmethod
    def sketch(cls, config: Config, vocab_size: int, num_samples: int) -> ModelSketch:
        """The model for `plan`, on tensors without values. Raises `UserError` if it is unknown without the data."""
        raise UserError(f"task={config.task}: cannot be planned; the class has no `sketch`")

    @property
    @abstractmethod
    def layers(self) -> Sequence[Layer]:
        """The layers of the whole model, in order; the last one returns the sum of the losses. In evaluation it may
        return a vector: that sum and `num_sums` - 1 other sums for `metrics`."""

    @abstractmethod
    def batch(self, epoch: int, items: range) -> Batch:
        """The training samples of these items of the sampler."""

    @abstractmethod
    def has_split(self, split: str) -> bool:
        """Whether there is a "valid" split, which training needs, or a "test" split."""

    @abstractmethod
    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        """This replica's part of a split: of the first `eval_samples` samples, or of all."""

    def evaluation_parts(self, split: str) -> Mapping[str, Iterator[Batch]]:
        """`evaluation_batches` in parts whose losses are also told by themselves, such as the sources of a mixture: by
        name, on all replicas the same names in the same order. By default one part without a name."""
        return {"": self.evaluation_batches(split)}

    @property
    def lookups_per_step(self) -> int:
        """About how many tokens a full step looks up in one embedding, over all replicas."""
        return self.targets_per_step

    @property
    def eval_samples(self) -> int | None:
        """How many samples of a split are evaluated at most, the first ones in the order of the data; None: all."""
        return eval_samples(self.config.training)

    @abstractmethod
    def micro_batch(self, batch: Batch) -> MicroBatch:
        """A batch, or a part of one, as the inputs and targets of the layers."""

    @abstractmethod
    def num_targets(self, batch: Batch) -> int:
        """The number of targets of a batch: the sum of the losses divided by it is the mean loss."""

    def count_flops(self) -> None:
        """Prepare `flops`, if that takes time. Called on all ranks before the first step if the device's peak is
        known."""
        return

    def flops(self, batch: Batch) -> float:
        """FLOPs of the matrix products in forward and backward of a training batch, nothing counted twice that is
        computed again (`models.flops`). With them the metrics have `mfu`; 0: not known."""
        return 0.0

    num_sums: int = 1
    """The number of sums that the last layer returns in evaluation."""

    def metrics(self, sums: Sequence[float], count: int) -> dict[str, float]:
        """The metrics of a whole split, including "loss", from the sums over its samples and the number of targets."""
        return loss_metrics(sums[0] / count)

    @property
    def metric_names(self) -> list[str]:
        """The names in `metrics` and `more_metrics`, which are the values that `training.best_metric` may have."""
        return list(self.metrics([1.0] * self.num_sums, 1))

    @classmethod
    def possible_metrics(cls, config: Config) -> list[str]:
        """The names that `metric_names` may have, whatever the data are. They are believed unless a subclass replaces
        `metrics`, `more_metrics` or `metric_names` and not this."""
        return list(loss_metrics(1.0))

    def more_metrics(self, split: str, group: Group) -> dict[str, float]:
        """Metrics that are not computed from the sums, such as BLEU; equal on all ranks. Collective over the group of
        the replicas; the model is in evaluation mode."""
        return {}

    def text_samples(self, split: str, number: int) -> Sequence[Mapping[str, str]]:
        """Up to `number` samples of what the model writes, such as [{"prompt": …, "continuation": …}]; by default none.

        Called after the evaluation of the split, on the first replica only and there on each rank of its tensor group,
        with the model in evaluation mode and without gradients. It must not draw from torch's global generators.
        """
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """Remarks on the metrics, printed at the end of a run."""
        return ()

    def stored_weights(self) -> Callable[[str], Tensor] | None:
        """From the name of a parameter to its whole initial value; None: the modules draw them.

        Raises `UserError`, as does what it returns, if they are not those of this model.
        """
        return None

    @property
    def frozen(self) -> Collection[str]:
        """Names of parameters that are not trained, sent or saved, as the model always begins with the same values."""
        return ()

    @property
    def cuts(self) -> Mapping[str, TensorSplit]:
        """The weights that the ranks of a tensor group share, and how: as the model says, if it does."""
        own: Callable[[bool], Mapping[str, TensorSplit]] | None = getattr(self.model, "cuts", None)
        return {} if own is None else own(self.config.parallel.vocab_parallel)

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """The tokenizers that a checkpoint keeps, by the prefix of their file names."""
        return {}

    @property
    def files(self) -> Mapping[str, str]:
        """Other texts that a checkpoint keeps, by file name."""
        return {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """Other facts that a checkpoint keeps, as JSON values."""
        return {}


def largest_vocabulary(task: Task) -> int | None:
    """The number of tokens of the task's largest tokenizer; None: it has none."""
    return max((tokenizer.vocab_size for tokenizer in task.tokenizers.values()), default=None)


class Samples(Protocol):
    """The samples of a split."""

    @property
    def lengths(self) -> NDArray[np.int64] | LengthOrder:
        """The length of each sample, in tokens or whatever a batch is padded with (N,); or the samples sorted by it."""
        ...


class ExampleTask(Task):
    """A task whose samples differ in length. `data.splits` are `Samples` by name; `collate` makes a batch of them.

    An item of the sampler is a batch, so an accumulation step has `training.batch_size` samples or up to
    `data.batch_tokens` tokens, and every rank takes the same number of steps. With `training.global_batch_size` a step
    has `global_batch_size` / `batch_size` batches, rounded up.
    """

    def __init__(self, config: Config, data: Any, replica: Replica) -> None:
        super().__init__(config, data, replica)
        self.splits: Mapping[str, Samples] = data.splits
        self._orders: dict[str, LengthOrder] = {}  # of evaluation, by split
        self.sampler: Sampler = StepSampler(0, 1, 1, replica)
        self.targets_per_step = self._lookups_per_step = 1  # no steps without a training split
        if "train" in self.splits:
            batch_size = config.training.batch_samples
            self.batches = LengthBuckets(self._order("train"), batch_size, config.data.batch_tokens, config.seed)
            num_batches = -(-step_samples(config.training, replica.size) // batch_size)
            self.sampler = self.batches.sampler(num_batches, replica)
            self.targets_per_step = max(1, round(self.num_training_targets * num_batches / self.batches.num_items))
            self._lookups_per_step = round(self._order("train").num_tokens * num_batches / self.batches.num_items)

    @property
    def lookups_per_step(self) -> int:
        return self._lookups_per_step

    @abstractmethod
    def collate(self, split: str, numbers: NDArray[np.int64]) -> Batch:
        """Make one batch of these samples of a split."""

    @property
    def num_training_targets(self) -> int:
        """The number of targets per epoch; by default the number of samples."""
        return len(self.splits["train"].lengths)

    def batch(self, epoch: int, items: range) -> Batch:
        (item,) = items
        return self.collate("train", self.batches.item(epoch, item))

    def has_split(self, split: str) -> bool:
        return split in self.splits

    def evaluation_numbers(self, split: str) -> Iterator[NDArray[np.int64]]:
        """The numbers of this replica's samples of a split, one array per batch."""
        training = self.config.training
        size = training.eval_batch_size or training.batch_samples
        for numbers in dealt_batches(self._evaluated(split), size, self.config.data.batch_tokens, self.replica):
            self.tick()
            yield numbers

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        return (self.collate(split, numbers) for numbers in self.evaluation_numbers(split))

    def _evaluated(self, split: str) -> LengthOrder:
        """The samples that evaluation sees."""
        if split not in self._orders:
            order, most = self._order(split), self.eval_samples
            self._orders[split] = order if most is None or most >= len(order) else order.first(most)
        return self._orders[split]

    def _order(self, split: str) -> LengthOrder:
        lengths = self.splits[split].lengths
        return lengths if isinstance(lengths, LengthOrder) else LengthOrder.of(lengths)
