"""Beam search for many sentences at once; width 1 is greedy search.

Scores are log probabilities divided by ((5 + length) / 6)^penalty (Wu et al. 2016, arXiv 1609.08144, section 7). A
sentence is finished when the number of its ended hypotheses reaches the beam width.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Steps(Protocol):
    """A decoder with the state of R rows: the tokens seen so far."""

    def step(self, tokens: Tensor) -> Tensor:
        """Take the next token of each row [R]; return the log probabilities of the token after it [R, V]."""
        ...

    def select(self, rows: Tensor) -> None:
        """Continue with these rows [R'], in this order; a row may be repeated."""
        ...


class Hypothesis(NamedTuple):
    """A decoded sentence, without its begin and end tokens, and its score."""

    tokens: list[int]
    score: float


@torch.no_grad()
def beam_search(
    steps: Steps, limits: Tensor, begin: int, end: int, *, beam: int = 1, length_penalty: float = 0.6
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, at most `beam`, best first.

    `steps` has one row per sentence. `limits` [B]: the maximum number of tokens of each sentence, without its end.
    """
    device, number = limits.device, len(limits)
    ended: list[list[Hypothesis]] = [[] for _ in range(number)]
    alive = torch.arange(number, device=device)  # sentences not yet finished [A]
    steps.select(alive.repeat_interleave(beam))
    # The rows of a sentence are equal at first: only the first one counts.
    scores = torch.full((number, beam), -torch.inf, dtype=torch.float64, device=device)
    scores[:, 0] = 0
    tokens = torch.full((number, beam, 1), begin, device=device)
    for length in range(int(limits.max()) + 1):
        found = steps.step(tokens[:, :, -1].flatten()).to(scores.dtype)
        size = found.size(-1)
        following = found.view(len(alive), beam, size)
        last = limits[alive] == length
        if last.any():  # these must end now
            only = torch.full((size,), -torch.inf, dtype=scores.dtype, device=device)
            only[end] = 0
            following[last] += only
        totals = (scores[:, :, None] + following).flatten(1)
        # 2 × beam candidates suffice: at most half of them end.
        best, places = totals.topk(min(2 * beam, totals.size(1)), sorted=True)
        rows, words = places.div(size, rounding_mode="floor"), places % size
        ends = words == end
        penalty = ((5 + length + 1) / 6) ** length_penalty
        for index, place in (ends[:, :beam] & best[:, :beam].isfinite()).nonzero().tolist():
            sentence = int(alive[index])
            if len(ended[sentence]) < beam:
                own = tokens[index, rows[index, place], 1:].tolist()
                ended[sentence].append(Hypothesis(own, float(best[index, place]) / penalty))
        done = last | torch.tensor([len(ended[sentence]) >= beam for sentence in alive.tolist()], device=device)
        # The best rows that continue, in order; if there are fewer than `beam`, rows with score -inf fill up.
        order = ends.to(torch.int8).sort(dim=1, stable=True).indices[:, :beam]
        scores = best.masked_fill(ends, -torch.inf).gather(1, order)
        rows, words = rows.gather(1, order), words.gather(1, order)
        stay = (~done).nonzero().flatten()
        if not len(stay):
            break
        scores, rows, words, alive = scores[stay], rows[stay], words[stay], alive[stay]
        kept = (stay[:, None] * beam + rows).flatten()
        tokens = torch.cat([tokens.flatten(0, 1)[kept].unflatten(0, (-1, beam)), words[:, :, None]], 2)
        steps.select(kept)
    return [sorted(found, key=lambda hypothesis: -hypothesis.score) for found in ended]
