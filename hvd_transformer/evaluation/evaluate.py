"""Evaluation of a whole split: sums and counts on each rank, reduced once, so their number does not matter."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group


@dataclass(frozen=True)
class Evaluation:
    """Sums over a split, the first of which is of the losses in nats, and the number of targets; what a task makes of
    them, and perhaps more, are the metrics."""

    sums: list[float]
    count: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean."""
        return self.sums[0] / self.count

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond a float."""
    return math.exp(loss) if loss < 709 else math.inf


def evaluate(results: Iterable[tuple[Tensor, int]], group: Group, num_sums: int = 1) -> Evaluation:
    """Every rank gives those of its own batches, each (sums [num_sums], count); all get the same result.

    Sums are float64.
    """
    total = torch.zeros(num_sums + 1, dtype=torch.float64)
    with torch.no_grad():
        for sums, count in results:
            total[:-1] += sums.to("cpu", torch.float64)
            total[-1] += count
    group.all_reduce_(total, "evaluation")
    *sums_, count_ = total.tolist()
    return Evaluation(sums_, int(count_))
