"""BLEU of translations: by sacrebleu (Post 2018, arXiv 1804.08771), and of lower-cased words, as older results are."""

from collections.abc import Sequence
from functools import cache


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
