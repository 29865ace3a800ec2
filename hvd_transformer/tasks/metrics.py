"""Metrics: sums over ranks, perplexity, BLEU, accuracy and F1, and which direction is better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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


@cache
def signature() -> str:
    """What says how sacrebleu counted."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())


def bleu_metrics(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Of a whole split, in percent: "bleu" is sacrebleu's, "bleu_words" torchtext's of basic_english words."""
    from sacrebleu.metrics.bleu import BLEU
    from torchtext.data.metrics import bleu_score
    from torchtext.data.utils import get_tokenizer

    words = get_tokenizer("basic_english")
    of_words = bleu_score([words(text) for text in hypotheses], [[words(text)] for text in references])
    return {
        "bleu": float(BLEU().corpus_score(list(hypotheses), [list(references)]).score),
        "bleu_words": 100 * float(of_words),
    }


def classification_metrics(matrix: NDArray[np.float64], positive: int | None) -> dict[str, float]:
    """Of counts [C, C], a row a label and a column a class found for it: accuracy, and precision, recall and F1 as the
    mean over the classes ("macro") and, with `positive`, of that class alone.

    A quotient whose divisor is zero is zero, as in scikit-learn's `zero_division=0`.
    """
    hits = np.diag(matrix)
    precision, recall = _quotient(hits, matrix.sum(0)), _quotient(hits, matrix.sum(1))
    f1 = _quotient(2 * hits, matrix.sum(0) + matrix.sum(1))
    # As scikit-learn: over the classes that occur, as a label or as what was found for one.
    there = matrix.sum(0) + matrix.sum(1) > 0
    result = {"accuracy": float(hits.sum() / matrix.sum())}
    if positive is not None:
        result |= {"precision": precision[positive], "recall": recall[positive], "f1": f1[positive]}
    for name, own in (("precision", precision), ("recall", recall), ("f1", f1)):
        result[f"{name}_macro"] = own[there].mean()
    return {name: float(value) for name, value in result.items()}


def _quotient(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


# Metrics of which less is better.
_FALLING = {"loss", "perplexity"}


def chosen(metrics: Mapping[str, float], name: str) -> float:
    """The metric named by `training.best_metric`, turned so that less is better."""
    plain = name.removeprefix("-")
    return metrics[plain] if name != plain or plain in _FALLING else -metrics[plain]


def show_metrics(split: str, values: Mapping[str, Any]) -> str:
    """A split's metrics as the screen has them; empty where there are none."""
    digits = {"perplexity": 2, "bleu": 2, "bleu_words": 2}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {value:.{digits.get(name, 4)}f}"
        for key, value in values.items()
        if (name := key.removeprefix(f"{split}_")) != key and value is not None
    )
    return shown and f"{split} {shown}"
