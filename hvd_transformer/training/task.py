"""What the loop asks of a task: its layers, and batches. The rest of training is the same for all."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from hvd_transformer.data.sampler import Intervals, Step
from hvd_transformer.models.shares import Cut
from hvd_transformer.parallel.pipeline import Layer, MicroBatch

# A batch is a named tuple of tensors whose first dimension counts the samples.
Batch = tuple[Tensor, ...]


def cut(batch: Batch, most: int) -> list[Batch]:
    """A round's micro-batches: at most so many, the last smaller where they do not divide it."""
    size = -(-batch[0].size(0) // most)
    return list(zip(*(tensor.split(size) for tensor in batch), strict=True))


class Sampler(Protocol):
    """Which units of an epoch this replica takes, step by step (`data.sampler`)."""

    def num_steps(self, remaining: Intervals | None = None) -> int: ...

    def epoch(self, remaining: Intervals | None = None) -> Iterator[Step]: ...


class Task(Protocol):
    """One kind of model and its data, as one replica sees it."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def usual_count(self) -> int:
        """Targets of a full step over all replicas: keeps gradients near their mean while they are summed."""
        ...

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """The weights that the ranks of a tensor group share, and how."""
        ...

    @property
    def dropping_shares(self) -> Collection[str]:
        """The dropouts on what these ranks share, too."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        ...

    def batch(self, epoch: int, units: range) -> Batch:
        """The training samples of these units."""
        ...

    def has_split(self, split: str) -> bool:
        """Whether there is a "valid" or "test" split."""
        ...

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        """This replica's part of a whole split."""
        ...

    @property
    def layers(self) -> Sequence[Layer]:
        """The whole model, in order; the last one returns the sum of the losses."""
        ...

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """A batch (or a part of one) as the layers take it."""
        ...

    def num_targets(self, batch: Batch) -> int:
        """What the sum of the losses is divided by, for their mean."""
        ...
