"""Metrics: sums over all batches and ranks; counts of classes against scikit-learn; BLEU against computed examples."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_world import FakeWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor, nn

from hvd_transformer.comm.world import World
from hvd_transformer.models.classifier import classification_loss
from hvd_transformer.tasks.metrics import (
    classification_metrics,
    evaluate,
    is_better,
    perplexity,
    signature,
    together,
    translation_metrics,
)


def test_what_is_no_number_is_never_the_best_and_does_not_stay_it() -> None:
    assert is_better(3.0, None) and is_better(2.0, 3.0) and is_better(3.0, math.inf) and is_better(3.0, math.nan)
    assert not any(is_better(value, best) for value, best in [(3.0, 3.0), (4.0, 3.0), (math.inf, 3.0)])
    assert not any(is_better(math.nan, best) for best in (None, 3.0, math.inf, math.nan))


def total(batch: Tensor) -> tuple[Tensor, int]:
    return batch.sum(), batch.numel()


@pytest.mark.parametrize("sizes", [[7], [1, 6], [3, 3, 1], [1] * 7])
def test_the_mean_is_over_tokens_not_over_batches(sizes: list[int]) -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    assert evaluate([map(total, values.split(sizes))], World()) == [([127.0], 7)]


def test_ranks_are_summed_before_the_division() -> None:
    class OtherRank(FakeWorld):
        """Has one more batch, of two tokens with loss 10 each."""

        def all_reduce_async_(self, tensor: Tensor, name: str, operation: str = "sum") -> object:
            assert operation == "sum" and tensor.dtype == torch.float64
            return lambda: tensor.add_(torch.tensor([20.0, 2.0], dtype=torch.float64))

    assert evaluate([[total(torch.ones(8))]], OtherRank()) == [([28.0], 10)]


def test_sums_are_double_precision() -> None:
    """A float32 sum of 2^24 and ones stays at 2^24."""
    batches = [torch.tensor([2.0**24]), *[torch.ones(1)] * 100]
    assert evaluate([map(total, batches)], World()) == [([2**24 + 100], 101)]


def test_the_host_reads_a_part_after_its_last_batch() -> None:
    """A device without memory stands for a GPU: what the host reads there raises."""
    seen = []

    def results() -> Iterator[tuple[Tensor, int]]:
        for number in range(3):
            seen.append(number)
            yield torch.ones((), device="meta"), 1

    with pytest.raises(NotImplementedError, match="meta"):
        evaluate([results()], World())
    assert seen == [0, 1, 2]


def test_no_graph_is_kept() -> None:
    weight = nn.Parameter(torch.ones(3))

    def loss(batch: Tensor) -> tuple[Tensor, int]:
        product = weight * batch
        assert not product.requires_grad
        return product.sum(), 3

    assert evaluate([map(loss, [torch.ones(3)])], World()) == [([3.0], 3)]


def test_a_rank_without_a_batch_has_part_in_all_sums() -> None:
    assert evaluate([[], []], FakeWorld(), num_sums=3) == [([0.0, 0.0, 0.0], 0)] * 2


def test_parts_are_summed_by_themselves_and_together() -> None:
    parts = evaluate([[total(torch.ones(2)), total(torch.ones(3))], [], [total(torch.full((4,), 2.0))]], World())
    assert parts == [([5.0], 5), ([0.0], 0), ([8.0], 4)]
    assert together(parts) == ([13.0], 9)


def test_perplexity_is_the_exponential_and_infinite_beyond_a_float() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(708.9) < math.inf
    assert perplexity(1e6) == math.inf
    assert not perplexity(math.nan) < math.inf


samples = st.integers(2, 4).flatmap(
    lambda classes: st.lists(
        st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=40
    ).map(lambda pairs: (classes, np.array(pairs)))
)


def counted(pairs: np.ndarray, classes: int) -> np.ndarray:
    """As the last layer counts them in evaluation."""
    labels, predictions = torch.from_numpy(pairs).T
    logits = torch.nn.functional.one_hot(predictions, classes).double()
    _, *counts = classification_loss(logits, labels, 0.0, None, training=False).tolist()
    return np.reshape(counts, (3, classes))


@settings(deadline=None)  # the first call loads half of scikit-learn
@given(samples, st.integers(1, 3))
def test_the_numbers_are_scikit_learns(sample: tuple[int, np.ndarray], ranks: int) -> None:
    classes, pairs = sample
    total = sum(counted(part, classes) for part in np.array_split(pairs, ranks))
    truth, found = pairs[:, 0], pairs[:, 1]
    for positive in range(classes):
        own = classification_metrics(total, positive)
        wanted = {"accuracy": metrics.accuracy_score(truth, found)}
        for name in ("precision", "recall", "f1"):
            score = getattr(metrics, f"{name}_score")
            wanted[f"{name}_macro"] = score(truth, found, average="macro", zero_division=0)
            wanted[name] = score(truth == positive, found == positive, zero_division=0)
        assert own == pytest.approx(wanted)


def test_the_sums_of_many_classes_are_few() -> None:
    """A confusion matrix would have nine million."""
    logits, labels = torch.zeros(2, 3_000), torch.tensor([0, 2_999])
    sums = classification_loss(logits, labels, 0.0, None, training=False)
    assert len(sums) == 1 + 3 * 3_000
    assert sums[1:].sum() == 1 + 2 + 2


def test_of_more_than_two_classes_none_is_the_positive_one() -> None:
    assert set(classification_metrics(np.eye(3), None)) == {"accuracy", "precision_macro", "recall_macro", "f1_macro"}


# BLEU (Papineni et al. 2002, section 2.3) of these pairs, by hand: the matches of 1- to 4-grams over their number.
LOWER = "the cat sat on the red mat today", "the cat sat on the mat today"  # 7/7, 5/6, 3/5, 2/4, 7 words for 8
CASE = "a dog runs in the big park today", "a Dog runs in the big park today"  # 7/8, 5/7, 4/6, 3/5, but for the case


def test_bleu_of_one_sentence() -> None:
    expected = 100 * math.exp(1 - 8 / 7) * (7 / 7 * 5 / 6 * 3 / 5 * 2 / 4) ** 0.25
    found = translation_metrics([LOWER[1]], [LOWER[0]])
    assert (found["bleu"], found["bleu_words"]) == pytest.approx((expected, expected), rel=1e-6)


def test_bleu_of_a_corpus_adds_the_counts_and_only_words_ignore_the_case() -> None:
    found = translation_metrics([LOWER[1], CASE[1]], [LOWER[0], CASE[0]])
    brevity = 100 * math.exp(1 - 16 / 15)
    assert found["bleu"] == pytest.approx(brevity * (14 / 15 * 10 / 13 * 7 / 11 * 5 / 9) ** 0.25, rel=1e-6)
    assert found["bleu_words"] == pytest.approx(brevity * (15 / 15 * 12 / 13 * 9 / 11 * 7 / 9) ** 0.25, rel=1e-6)


def test_bleu_separates_punctuation_from_words() -> None:
    """As one word, "today." would not match "today"."""
    expected = 100 * math.exp(1 - 9 / 8) * (8 / 8 * 6 / 7 * 4 / 6 * 2 / 5) ** 0.25
    found = translation_metrics([f"{LOWER[1]} ."], [f"{LOWER[0]}."])
    assert (found["bleu"], found["bleu_words"]) == pytest.approx((expected, expected), rel=1e-6)


def test_bleu_without_a_matching_4_gram_is_smoothed_and_zero_for_words() -> None:
    """4/5, 2/4, 0/3, 0/2, smoothed as in mteval-v13a (Chen and Cherry 2014, method 3): 1/2, 1/4 for the zeros."""
    found = translation_metrics(["a man rides a horse"], ["a man is riding a horse"])
    expected = 100 * math.exp(1 - 6 / 5) * (4 / 5 * 2 / 4 * (1 / 2) / 3 * (1 / 4) / 2) ** 0.25
    assert found["bleu"] == pytest.approx(expected, rel=1e-6)
    assert found["bleu_words"] == 0


def test_bleu_of_the_reference_itself_is_a_hundred() -> None:
    references = ["A man is riding a horse in the park.", "Two dogs are running.", "Three women are talking to a man."]
    wanted = dict.fromkeys(("bleu", "bleu_words", "chrf"), 100)
    assert translation_metrics(references, references) == pytest.approx(wanted, rel=1e-6)


def test_chrf_of_one_sentence() -> None:
    """Popović 2015: the mean over 1- to 6-grams of characters without spaces of precision and recall, F with beta 2."""
    hypothesis, reference = "a cat", "a cap"  # acat and acap: 1- to 4-grams match 3/4, 2/3, 1/2, 0/1
    mean = (3 / 4 + 2 / 3 + 1 / 2 + 0) / 4
    assert translation_metrics([hypothesis], [reference])["chrf"] == pytest.approx(100 * mean)


def test_the_signature_says_how_it_was_counted() -> None:
    assert signature().startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
