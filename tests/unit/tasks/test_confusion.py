"""The numbers of a confusion matrix are scikit-learn's, and parts of it add up to them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from hvd_transformer.tasks.metrics import classification_metrics

samples = st.integers(2, 4).flatmap(
    lambda classes: st.lists(
        st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=40
    ).map(lambda pairs: (classes, np.array(pairs)))
)


def matrix(pairs: np.ndarray, classes: int) -> np.ndarray:
    counts = np.bincount(pairs[:, 0] * classes + pairs[:, 1], minlength=classes**2)
    return counts.reshape(classes, classes).astype(np.float64)


@settings(deadline=None)  # the first call loads half of scikit-learn
@given(samples, st.integers(1, 3))
def test_the_numbers_are_scikit_learns(sample: tuple[int, np.ndarray], ranks: int) -> None:
    classes, pairs = sample
    total = sum(matrix(part, classes) for part in np.array_split(pairs, ranks))
    truth, found = pairs[:, 0], pairs[:, 1]
    for positive in range(classes):
        own = classification_metrics(total, positive)
        wanted = {"accuracy": metrics.accuracy_score(truth, found)}
        for name in ("precision", "recall", "f1"):
            score = getattr(metrics, f"{name}_score")
            wanted[f"{name}_macro"] = score(truth, found, average="macro", zero_division=0)
            wanted[name] = score(truth == positive, found == positive, zero_division=0)
        assert own == pytest.approx(wanted)


def test_of_more_than_two_classes_none_is_the_positive_one() -> None:
    assert set(classification_metrics(np.eye(3), None)) == {"accuracy", "precision_macro", "recall_macro", "f1_macro"}
