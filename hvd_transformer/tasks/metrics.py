"""Metrics: sums over ranks, perplexity, BLEU, accuracy and F1, and which direction is better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.config.best_metric import metric_sign


class Evaluation(NamedTuple):
    """The metrics of a split, and the number of its targets."""

    metrics: dict[str, float]
    num_targets: int


def perplexity(loss: float) -> float:
    """exp(loss); infinite if that exceeds the range of a float."""
    return math.exp(loss) if loss < 709 else math.inf


def loss_metrics(loss: float) -> dict[str, float]:
    """The metrics that follow from a mean loss in nats."""
    return {"loss": loss, "perplexity": perplexity(loss)}


class Sums(NamedTuple):
    """Over the samples of a split, or of a part of one: sums in float64, the first one the loss in nats, and the number
    of targets."""

    sums: list[float]
    num_targets: int


def evaluate(parts: Iterable[Iterable[tuple[Tensor, int]]], group: Group, num_sums: int = 1) -> list[Sums]:
    """Add the results of all ranks, (sums [num_sums], number of targets), in each part. Each rank passes those of its
    own batches, and all get the same."""
    found = []
    with torch.no_grad():
        for results in parts:
            total, num_targets = torch.zeros(num_sums, dtype=torch.float64), 0
            for sums, count in results:  # on their device: a GPU computes while the host makes the next batch
                total = total.to(sums.device) + sums.double()
                num_targets += count
            found.append(torch.cat([total.cpu(), torch.tensor([num_targets], dtype=torch.float64)]))
    totals = torch.stack(found)
    group.all_reduce_(totals, "evaluation")
    return [Sums(sums, int(count)) for *sums, count in totals.tolist()]


def together(parts: Sequence[Sums]) -> Sums:
    """The sums over all parts."""
    sums = [sum(own) for own in zip(*(part.sums for part in parts), strict=True)]
    return Sums(sums, sum(part.num_targets for part in parts))


@cache
def signature() -> str:
    """sacrebleu's signature, which states how BLEU was computed."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())


TRANSLATION_METRICS = ("bleu", "bleu_words", "chrf")


def translation_metrics(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU and chrF of a whole split, in percent: "bleu" and "chrf" by sacrebleu, "bleu_words" by torchtext on
    basic_english words."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from torchtext.data.metrics import bleu_score
    from torchtext.data.utils import get_tokenizer

    words = get_tokenizer("basic_english")
    of_words = bleu_score([words(text) for text in hypotheses], [[words(text)] for text in references])
    return {
        "bleu": float(BLEU().corpus_score(list(hypotheses), [list(references)]).score),
        "bleu_words": 100 * float(of_words),
        "chrf": float(CHRF().corpus_score(list(hypotheses), [list(references)]).score),
    }


def classification_metrics(counts: NDArray[np.float64], positive: int | None) -> dict[str, float]:
    """Metrics of the numbers of hits, labels and predictions of each class [3, C]: accuracy, and precision, recall and
    F1 as the mean over the classes ("macro") and, with `positive`, of that class.

    A quotient with divisor zero is zero, as with `zero_division=0` in scikit-learn.
    """
    hits, labels, predictions = counts
    precision, recall = _quotient(hits, predictions), _quotient(hits, labels)
    f1 = _quotient(2 * hits, labels + predictions)
    # As in scikit-learn, the mean is over classes that occur as a label or as a prediction.
    there = labels + predictions > 0
    result = {"accuracy": float(hits.sum() / labels.sum())}
    if positive is not None:
        result |= {"precision": precision[positive], "recall": recall[positive], "f1": f1[positive]}
    for name, own in (("precision", precision), ("recall", recall), ("f1", f1)):
        result[f"{name}_macro"] = own[there].mean()
    return {name: float(value) for name, value in result.items()}


def _quotient(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def chosen(metrics: Mapping[str, float], name: str) -> float:
    """The metric named by `training.best_metric`, negated if necessary so that lower is better."""
    return metric_sign(name) * metrics[name.removeprefix("-")]


def is_better(value: float, best: float | None) -> bool:
    """Whether what `chosen` returned is better than the best so far. What is no number never is, nor stays the best."""
    return not math.isnan(value) and (best is None or not best <= value)


def show_metrics(split: str, values: Mapping[str, Any]) -> str:
    """The metrics of a split as one line for the screen; empty if there are none."""
    digits = {"perplexity": 2, "bleu": 2, "bleu_words": 2, "chrf": 2}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {value:.{digits.get(name, 4)}f}"
        for key, value in values.items()
        if (name := key.removeprefix(f"{split}_")) != key and value is not None
    )
    return shown and f"{split} {shown}"
