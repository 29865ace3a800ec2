"""What a confusion matrix says of a classifier; the matrix is a sum, so the number of ranks does not matter."""

import numpy as np
from numpy.typing import NDArray


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
