"""Continues texts with a language model: many prompts in one batch, each token computed once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvd_transformer.models.attention import KeyValues
from hvd_transformer.models.language_model import LanguageModel

# Called with a prompt's number and its next token.
Listener = Callable[[int, int], None]


class Sampling(NamedTuple):
    """How the next token is drawn. `temperature` 0 takes the likeliest; `top_k` leaves the k likeliest, and `top_p` the
    fewest that have this probability together (Holtzman et al. 2020, arXiv 1904.09751, section 3.1)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: Sampling,
    max_length: int,
    listener: Listener = lambda number, token: None,
) -> list[list[int]]:
    """`num_tokens` tokens after each prompt, or fewer where `max_length` positions are full.

    A prompt has one token at least. All go side by side: while the shorter prompts are continued, the longer ones are
    still read. What is drawn for a prompt hangs on the seed and its number, not on the others.
    """
    device = next(model.parameters()).device
    generators = [_generator(sampling.seed, number) for number in range(len(prompts))]
    rows = [list(prompt) for prompt in prompts]
    ends = [min(len(prompt) + num_tokens, max_length) for prompt in prompts]
    pasts = [KeyValues() for _ in model.blocks]
    active = list(range(len(rows)))
    length = min(map(len, rows))
    tokens = torch.tensor([row[:length] for row in rows], device=device)
    while True:
        logits = _step(model, tokens, pasts)
        for place, number in enumerate(active):
            if len(rows[number]) == length and length < ends[number]:
                rows[number].append(draw(logits[place], sampling, generators[number]))
                listener(number, rows[number][-1])
        going = [place for place, number in enumerate(active) if length + 1 < ends[number]]
        if not going:
            break
        if len(going) < len(active):
            kept = torch.tensor(going, device=device)
            for past in pasts:
                past.select(kept)
            active = [active[place] for place in going]
        tokens = torch.tensor([[rows[number][length]] for number in active], device=device)
        length += 1
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits [V]."""
    logits = logits.double().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = filtered(logits / sampling.temperature, sampling).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Minus infinity for tokens that may not be drawn. [V]"""
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p is not None:
        ordered, places = logits.sort(descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, places[before >= sampling.top_p], -torch.inf)
    return logits


def _generator(*key: int) -> torch.Generator:
    (seed,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed) & (2**63 - 1))


def _step(model: LanguageModel, tokens: Tensor, pasts: Sequence[KeyValues]) -> Tensor:
    """The logits [B, V] after these tokens [B, T], which follow what `pasts` have seen."""
    hidden: Tensor = model.embedding(tokens, pasts[0].length if pasts else 0)
    for block, past in zip(model.blocks, pasts, strict=True):
        hidden = block(hidden, None, past)
    return model.head.logits(hidden[:, -1])
