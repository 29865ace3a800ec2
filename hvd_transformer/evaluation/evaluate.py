"""Evaluation of a whole split: sums and counts on each rank, reduced once, so their number does not matter."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Evaluation:
    """Mean loss a token in nats, and the number of tokens it is the mean of."""

    loss: float
    count: int

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond a float."""
    return math.exp(loss) if loss < 709 else math.inf


def evaluate(loss: Callable[[Batch], tuple[Tensor, int]], batches: Iterable[Batch], group: Group) -> Evaluation:
    """Every rank gives its own batches; all get the same result. Sums are float64."""
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            loss_sum, count = loss(batch)
            sums += torch.tensor([loss_sum.item(), count], dtype=torch.float64)
    group.all_reduce_(sums, "evaluation")
    return Evaluation(loss=float(sums[0] / sums[1]), count=int(sums[1]))
