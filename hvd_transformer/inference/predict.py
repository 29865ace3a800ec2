"""Batched predictions for many lines of text: translation and classification."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_transformer.config.schema import TranslationConfig
from hvd_transformer.data.pair_tokenizer import PairTokenizer
from hvd_transformer.data.tokenizers import BEGIN, END, PAD, Tokenizer
from hvd_transformer.inference.beam_search import Hypothesis, beam_search
from hvd_transformer.models.encoder_decoder import EncoderDecoder

Result = TypeVar("Result")
Tokens = NDArray[Any]


def in_batches(
    lines: Iterable[str],
    encode: Callable[[Sequence[str]], Sequence[Tokens]],
    work: Callable[[list[Tokens]], Sequence[Result]],
    batch_size: int,
    window: int | None = None,
) -> Iterator[tuple[str, Result | None]]:
    """Yield each line with its result, in order; None for a line of white space or without tokens. `work` gets at most
    `batch_size` lines of similar length. `window` lines (None: 512, or a batch if that is more) are read before the
    first result."""
    iterator = iter(lines)
    while some := list(islice(iterator, window or max(512, batch_size))):
        encoded = encode(some)
        wanted = (number for number, line in enumerate(some) if line.strip() and len(encoded[number]))
        order = sorted(wanted, key=lambda number: len(encoded[number]))
        results: dict[int, Result] = {}
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            results |= zip(numbers, work([encoded[number] for number in numbers]), strict=True)
        for number, line in enumerate(some):
            yield line, results.get(number)


class DecoderSteps:
    """`beam_search.Steps` of an encoder-decoder, with the key-value caches of the tokens seen so far."""

    def __init__(self, model: EncoderDecoder, source: Tensor) -> None:
        self.model, self.allowed, self.pasts = model, source != PAD, model.new_pasts()
        self.memory: Tensor | None = model.encode(source, self.allowed)

    def step(self, tokens: Tensor) -> Tensor:
        hidden = self.model.decode(tokens[:, None], self.memory, self.allowed, self.pasts)
        self.memory = None  # the caches have its keys and values
        return self.model.head.logits(hidden[:, -1]).float().log_softmax(-1)

    def select(self, rows: Tensor) -> None:
        self.allowed = self.allowed.index_select(0, rows)
        if self.memory is not None:
            self.memory = self.memory.index_select(0, rows.to(self.memory.device))
        for past in self.pasts:
            past.own.select(rows)
            past.memory.select(rows)


@torch.no_grad()
def translate(
    model: EncoderDecoder,
    sources: Sequence[Tokens],
    max_length: int,
    target_length: int | None = None,
    *,
    beam: int = 1,
    length_penalty: float = 0.6,
) -> list[list[Hypothesis]]:
    """The hypotheses of each source, best first; all sources form one batch.

    A target has at most `target_length` tokens (None: 2 × the tokens of its source + 10), and at most `max_length`
    including its begin token.
    """
    device = model.head.weight.device  # where the search finds the log probabilities, if stages have several devices
    source = padded(sources).to(device)
    most = [target_length or 2 * len(own) + 10 for own in sources]
    limits = torch.tensor(most, device=device).clamp_max(max_length - 1)
    return beam_search(DecoderSteps(model, source), limits, BEGIN, END, beam=beam, length_penalty=length_penalty)


class _OwnLimits:
    """A processor of logits for `generate` of transformers: each target ends at the limit [B] of its source, whatever
    the other sources of the batch are."""

    def __init__(self, limits: Tensor, end: int) -> None:
        self.limits, self.end = limits, end

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """The scores [B × beams, V] of what follows the tokens [B × beams, T], of which the first one begins all."""
        limits = self.limits.repeat_interleave(len(tokens) // len(self.limits))
        ended = torch.full_like(scores, -torch.inf)
        ended[:, self.end] = 0
        return torch.where((limits <= tokens.size(1))[:, None], ended, scores)


def _end_of(model: Any) -> int:
    """The token that ends a target."""
    found = model.generation_config.eos_token_id
    return int(found[0] if isinstance(found, list) else found)


@torch.no_grad()
def translate_texts(
    model: nn.Module,
    num_positions: int,
    tokenizer: Tokenizer,
    sources: Sequence[Tokens],
    settings: TranslationConfig,
    target_length: int | None = None,
) -> list[str]:
    """The best translation of each source as text; all sources form one batch. `tokenizer` is the target's.

    A model of a Hugging Face folder (`PairTokenizer`) searches by its own `generate`, which divides the log probability
    of n tokens by n ** length_penalty; a target has at most `target_length` tokens (None: 2 × its source's
    + 10).
    """
    beam, length_penalty = settings.beam, settings.length_penalty
    if isinstance(model, EncoderDecoder):
        found = translate(model, sources, num_positions, target_length, beam=beam, length_penalty=length_penalty)
        # There is no hypothesis where the log probabilities are no numbers: an evaluation may come before the step that
        # finds out that training has diverged.
        return [tokenizer.decode_line(best[0].tokens) if best else "" for best in found]
    assert isinstance(tokenizer, PairTokenizer)
    source = padded(sources, tokenizer.pad).to(next(model.parameters()).device)
    # With a forced end it is one of the tokens, as of Marian; without, it follows them and is not counted.
    more = int(model.generation_config.forced_eos_token_id is None)  # type: ignore[union-attr]
    most = [min(target_length or 2 * len(own) + 10, num_positions - 1) + more for own in sources]
    rows = model.generate(  # type: ignore[operator]  # of transformers
        input_ids=source,
        attention_mask=(source != tokenizer.pad).long(),
        num_beams=beam,
        length_penalty=length_penalty,
        do_sample=False,
        max_new_tokens=max(most),
        logits_processor=[_OwnLimits(torch.tensor(most, device=source.device), _end_of(model))],
        forced_bos_token_id=tokenizer.forced_begin,
    )
    return [tokenizer.decode_line(row.tolist()) for row in rows]


def padded(rows: Sequence[Tokens], pad: int = PAD) -> Tensor:
    """Token sequences as one block [B, T], int64, padded at the end."""
    block = np.full((len(rows), max(map(len, rows))), pad, np.int64)
    for index, row in enumerate(rows):
        block[index, : len(row)] = row
    return torch.from_numpy(block)


@torch.no_grad()
def classify(model: nn.Module, texts: Sequence[Tokens], pad: int = PAD) -> Tensor:
    """The class probabilities [B, C] of each text; all texts form one batch, and each has at least one token.

    `model` returns logits [B, C], as `models.classifier.Classifier` does.
    """
    tokens = padded(texts, pad).to(next(model.parameters()).device)
    probabilities: Tensor = model(tokens, tokens != pad).double().softmax(-1)
    return probabilities
