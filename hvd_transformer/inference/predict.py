"""Predictions for many lines of text, in batches: translation and classification."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_transformer.data.tokenizers import BEGIN, END, PAD
from hvd_transformer.inference.beam_search import Hypothesis, beam_search
from hvd_transformer.models.encoder_decoder import EncoderDecoder

Result = TypeVar("Result")
Tokens = NDArray[Any]
WINDOW = 512  # lines read before the first result


def in_batches(
    lines: Iterable[str],
    encode: Callable[[Sequence[str]], Sequence[Tokens]],
    work: Callable[[list[Tokens]], Sequence[Result]],
    batch_size: int,
    window: int = WINDOW,
) -> Iterator[tuple[str, Result | None]]:
    """Each line with its result, in order; None for one without a token. `work` gets `batch_size` lines at most."""
    iterator = iter(lines)
    while some := list(islice(iterator, window)):
        encoded = encode(some)
        order = sorted((number for number in range(len(some)) if len(encoded[number])), key=lambda n: len(encoded[n]))
        results: dict[int, Result] = {}
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            results |= zip(numbers, work([encoded[number] for number in numbers]), strict=True)
        for number, line in enumerate(some):
            yield line, results.get(number)


class DecoderSteps:
    """An encoder-decoder's `beam_search.Steps`, with the keys and values of what it has seen."""

    def __init__(self, model: EncoderDecoder, source: Tensor) -> None:
        self.model, self.allowed, self.pasts = model, source != PAD, model.new_pasts()
        self.memory = model.encode(source, self.allowed)

    def step(self, tokens: Tensor) -> Tensor:
        hidden = self.model.decode(tokens[:, None], self.memory, self.allowed, self.pasts)
        return self.model.head.logits(hidden[:, -1]).float().log_softmax(-1)

    def select(self, rows: Tensor) -> None:
        self.memory, self.allowed = self.memory.index_select(0, rows), self.allowed.index_select(0, rows)
        for past in self.pasts:
            past.own.select(rows)
            past.memory.select(rows)


@torch.no_grad()
def translate(
    model: EncoderDecoder,
    sources: Sequence[NDArray[np.unsignedinteger]],
    max_length: int,
    *,
    beam: int = 1,
    length_penalty: float = 0.6,
) -> list[list[Hypothesis]]:
    """Each source's hypotheses, the best first; all sources at once. A target has at most twice its source's tokens
    and 10 more, and `max_length` with its beginning."""
    device = next(model.parameters()).device
    source = padded(sources).to(device)
    limits = torch.tensor([min(2 * len(own) + 10, max_length - 1) for own in sources], device=device)
    steps = DecoderSteps(model, source)
    return beam_search(steps, limits, BEGIN, END, beam=beam, length_penalty=length_penalty)


def padded(rows: Sequence[NDArray[np.unsignedinteger]], pad: int = PAD) -> Tensor:
    """Sequences of token numbers as one block [B, T], int64, padded at their ends."""
    block = np.full((len(rows), max(map(len, rows))), pad, np.int64)
    for index, row in enumerate(rows):
        block[index, : len(row)] = row
    return torch.from_numpy(block)


@torch.no_grad()
def classify(model: nn.Module, texts: Sequence[NDArray[np.unsignedinteger]], pad: int = PAD) -> Tensor:
    """The probabilities [B, C] of each text's classes, all texts at once; each has one token at least.

    `model` gives logits [B, C], as `models.classifier.Classifier` does.
    """
    tokens = padded(texts, pad).to(next(model.parameters()).device)
    probabilities: Tensor = model(tokens, tokens != pad).double().softmax(-1)
    return probabilities
