"""BLEU is sacrebleu's and torchtext's own, of the whole split."""

import pytest
import sacrebleu
from torchtext.data.metrics import bleu_score

from hvd_transformer.tasks.metrics import bleu_metrics, signature

FOUND = ["A man rides a horse in the park.", "Two dogs run!", "", "three Women are talking to a man ."]
WANTED = [
    "A man is riding a horse in the park.",
    "Two dogs are running.",
    "nothing",
    "Three women are talking to a man.",
]


def test_both_numbers() -> None:
    found = bleu_metrics(FOUND, WANTED)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(FOUND, [WANTED]).score)
    # basic_english: lower case, punctuation apart.
    last = "three women are talking to a man ."
    words = ["a man rides a horse in the park .", "two dogs run !", "", last]
    wanted = ["a man is riding a horse in the park .", "two dogs are running .", "nothing", last]
    own, other = ([text.split() for text in texts] for texts in (words, wanted))
    assert found["bleu_words"] == pytest.approx(100 * bleu_score(own, [[text] for text in other]))
    assert 30 < found["bleu"] < found["bleu_words"] < 80


def test_the_same_text_is_a_hundred() -> None:
    assert bleu_metrics(WANTED, WANTED)["bleu"] == pytest.approx(100)
    assert bleu_metrics(WANTED, WANTED)["bleu_words"] == pytest.approx(100, rel=1e-6)


def test_the_signature_says_how_it_was_counted() -> None:
    assert signature().startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
