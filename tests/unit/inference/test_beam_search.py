"""Beam search against all sequences there are, greedy search against argmax, and the cache against none."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.data.tokenizers import BEGIN, END, PAD
from hvd_transformer.inference.beam_search import beam_search
from hvd_transformer.inference.predict import translate
from hvd_transformer.models.encoder_decoder import EncoderDecoder

V = 6


class TableSteps:
    """The probabilities of the next token hang on all before it; every sentence has other ones."""

    def __init__(self, number: int, sharpness: float = 2.0) -> None:
        self.rows = [(sentence,) for sentence in range(number)]
        self.sharpness = sharpness

    def step(self, tokens: Tensor) -> Tensor:
        self.rows = [(*row, int(token)) for row, token in zip(self.rows, tokens.tolist(), strict=True)]
        return torch.stack([self.after(row) for row in self.rows])

    def select(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]

    def after(self, row: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash(row) % 2**31)
        return (self.sharpness * torch.randn(V, generator=generator, dtype=torch.float64)).log_softmax(-1)


def every(sentence: int, limit: int, penalty: float) -> list[tuple[float, list[int]]]:
    """All sequences of at most `limit` tokens and an end, the best first."""
    steps, found = TableSteps(0), []
    words = [word for word in range(V) if word != END]
    for length in range(limit + 1):
        for tokens in product(words, repeat=length):
            row, total = (sentence, BEGIN), 0.0
            for token in (*tokens, END):
                total += float(steps.after(row)[token])
                row = (*row, token)
            found.append((total / ((5 + length + 1) / 6) ** penalty, list(tokens)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_a_beam_wide_enough_finds_the_best_of_all(penalty: float) -> None:
    limits = torch.tensor([3, 2, 4])
    found = beam_search(TableSteps(3), limits, BEGIN, END, beam=800, length_penalty=penalty)
    for sentence, limit in enumerate(limits.tolist()):
        wanted = every(sentence, limit, penalty)
        assert len(found[sentence]) == len(wanted)
        for hypothesis, (best, tokens) in zip(found[sentence], wanted, strict=True):
            assert hypothesis.score == pytest.approx(best)
            assert hypothesis.tokens == tokens


def test_width_one_is_greedy_search() -> None:
    limits, steps = torch.tensor([9, 1, 0, 30, 6, 8]), TableSteps(0)
    found = beam_search(TableSteps(6), limits, BEGIN, END, beam=1)
    for sentence, limit in enumerate(limits.tolist()):
        row, tokens = (sentence, BEGIN), []
        while len(tokens) < limit and (token := int(steps.after(row).argmax())) != END:
            tokens.append(token)
            row = (*row, token)
        assert [hypothesis.tokens for hypothesis in found[sentence]] == [tokens]


def test_other_sentences_change_nothing() -> None:
    limits = torch.tensor([9, 4, 12, 2])
    together = beam_search(TableSteps(4), limits, BEGIN, END, beam=3)
    for sentence in range(4):
        alone = TableSteps(0)
        alone.rows = [(sentence,)]
        assert beam_search(alone, limits[sentence : sentence + 1], BEGIN, END, beam=3)[0] == together[sentence]
        assert 1 <= len(together[sentence]) <= 3
        assert all(math.isfinite(hypothesis.score) for hypothesis in together[sentence])


def test_a_translation_is_as_long_as_the_target_may_be() -> None:
    """A model that never says </s> fills whatever limit there is."""
    torch.manual_seed(1)
    sizes = {"num_layers": 1, "d_model": 16, "num_heads": 4, "d_feedforward": 24, "max_length": 30}
    model = EncoderDecoder(30, 25, ModelConfig(**sizes, tie_embeddings=False)).eval()
    model.head.bias.data[END] = -1e9
    sources = [torch.randint(4, 30, (length,)).numpy() for length in (3, 12)]
    for target_length, wanted in {None: [16, 29], 7: [7, 7], 25: [25, 25], 100: [29, 29]}.items():
        found = translate(model, sources, 30, target_length, beam=2)
        assert [len(hypotheses[0].tokens) for hypotheses in found] == wanted, target_length


@pytest.mark.parametrize("position", ["sinusoidal", "rotary"])
def test_the_cache_gives_the_tokens_of_computing_all_again(position: str) -> None:
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 4, "d_feedforward": 24, "max_length": 20}
    model = EncoderDecoder(30, 25, ModelConfig(**sizes, position=position, tie_embeddings=False)).eval()
    model.head.weight.data.normal_(std=1.0)  # so that it says more than one word
    sources = [torch.randint(4, 30, (length,)).numpy() for length in (3, 7, 5)]
    found = translate(model, sources, 20)
    said = set()
    for source, hypotheses in zip(sources, found, strict=True):
        block, tokens = torch.tensor(source)[None], [BEGIN]
        with torch.no_grad():
            while len(tokens) <= min(2 * len(source) + 10, 19):
                logits = model(block, block != PAD, torch.tensor(tokens)[None])
                token = int(logits[0, -1].argmax())
                if token == END:
                    break
                tokens.append(token)
        assert hypotheses[0].tokens == tokens[1:]
        said |= set(tokens)
    assert len(said) > 5
