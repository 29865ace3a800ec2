"""How far a job has come, and the result of one step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hvd_transformer.config.schema import TrainingConfig
from hvd_transformer.data.sampler import Intervals


@dataclass
class TrainState:
    """How far the job has come: all that the next step depends on beside weights and optimizer state.

    Its members are the keys of `position` in a checkpoint's state.json. `step`, `epoch` and `remaining` are of the last
    step that is queued, and the sums of the last one that is read: the same one at evaluations and checkpoints.
    """

    step: int = 0
    updates: int = 0  # steps without those skipped because a float16 gradient overflowed
    epoch: int = 0
    remaining: Intervals | None = None  # of this epoch; None: all of it
    samples: int = 0
    targets: int = 0  # that the losses are the mean of: tokens or samples
    seconds: float = 0.0
    best: float | None = None  # of best_metric
    best_metric: str | None = None  # training.best_metric
    best_step: int | None = None
    not_better: int = 0  # evaluations since then
    evaluated_step: int | None = None
    rate_batch_size: int | None = None  # the training.batch_size that the learning rate is scaled by
    train_loss: float | None = None  # of the last line of metrics.jsonl
    # Since the last line of metrics.jsonl.
    interval: dict[str, float] = field(
        default_factory=lambda: {"loss": 0.0, "count": 0.0, "seconds": 0.0, "steps": 0.0}
    )

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def choose_best_by(self, metric: str) -> None:
        """Forget the best evaluation so far if `training.best_metric` has changed."""
        if self.best_metric not in (None, metric):  # None: a new job, or a checkpoint older than this member
            self.forget_best()
        self.best_metric = metric

    def forget_best(self) -> None:
        """Forget all evaluations so far."""
        self.best, self.best_step, self.not_better, self.evaluated_step = None, None, 0, None

    def keep_rate(self, training: TrainingConfig, made_with: Mapping[str, Any]) -> None:
        """Keep the batch size that the learning rate was scaled by; `made_with`: a checkpoint's configuration."""
        if self.rate_batch_size is None:  # a new job, or a checkpoint older than this member
            self.rate_batch_size = made_with.get("training.batch_size", training.batch_samples)
        if training.global_batch_size is None:  # without effect now: later it counts from here
            self.rate_batch_size = training.batch_samples

    def advance(self, remaining: Intervals) -> None:
        """Count one more step; `remaining` is what is left of its epoch."""
        self.step += 1
        self.remaining = remaining or None
        if not remaining:
            self.epoch += 1

    def count(self, samples: int, targets: int) -> None:
        """Count the samples and targets of a step, over all ranks."""
        self.samples += samples
        self.targets += targets

    @classmethod
    def load(cls, state: dict[str, Any]) -> "TrainState":
        loaded = cls(**state)
        if loaded.remaining is not None:
            loaded.remaining = [(start, stop) for start, stop in loaded.remaining]
        return loaded


class Wishes(NamedTuple):
    """Requests to all ranks after a step; combined over ranks, those that any rank has made."""

    stop: bool = False
    save: bool = False  # a checkpoint
    compare: bool = False  # the ranks' work, to find slow ones


NO_WISHES = Wishes()


class Sums(NamedTuple):
    """Sums over the samples of some steps."""

    loss: float = 0.0
    targets: int = 0
    samples: int = 0

    def plus(self, other: "Sums") -> "Sums":
        return Sums(self.loss + other.loss, self.targets + other.targets, self.samples + other.samples)


class StepTotals(NamedTuple):
    """One step of all ranks together; with local steps, all since the ranks last told each other, perhaps none."""

    loss: float  # the mean over the targets
    targets: int
    samples: int
    wishes: Wishes
    costs: Sequence[float] = ()  # sums of what the ranks' `StepCosts` took


class StepResult(NamedTuple):
    """The result of one step."""

    step: int  # counted from 1
    epoch: int  # counted from 0
    totals: StepTotals
    grad_norm: float
    learning_rate: float
    seconds: float  # on this rank
    work: float  # seconds of these in which this rank did not wait for others; of steps read late only their sum counts
    data: float  # of `work`: seconds for the batches
    update: float  # of `work`: seconds for norm, clip and optimizer, if no other step was queued meanwhile
    flops: float = 0.0  # of this replica, in forward and backward without recomputing; 0: not known
