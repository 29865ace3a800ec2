"""Text generation with a language model: many prompts in one batch, with a key-value cache."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hvd_transformer.models.attention import KVCache
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.models.pretrained import eos_token_ids

_WINDOW = 512  # prompts that are ordered by length


class Sampling(NamedTuple):
    """How the next token is sampled. `temperature` 0 takes the most likely token; `top_k` keeps the k most likely ones,
    and `top_p` the smallest set whose total probability reaches it (nucleus sampling, Holtzman et al. 2020, arXiv
    1904.09751, section 3.1)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1


class LanguageModelSteps:
    """A language model with the key-value caches of the tokens seen so far."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.pasts = model, [KVCache() for _ in model.blocks]

    def step(self, tokens: Tensor) -> Tensor:
        """The logits [B, V] after these tokens [B, T], which continue those seen so far."""
        hidden: Tensor = self.model.embedding(tokens, self.pasts[0].length)
        for block, past in zip(self.model.blocks, self.pasts, strict=True):
            hidden = block(hidden, None, past)
        return self.model.head.logits(hidden[:, -1])

    def select(self, rows: Tensor) -> None:
        """Continue with these rows of the batch."""
        for past in self.pasts:
            past.select(rows)


class PretrainedSteps:
    """`LanguageModelSteps` for a model of transformers. One whose cache cannot select rows, as those of recurrent and
    hybrid models, reads all its tokens again for each."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.past: Any = None
        self.seen: Tensor | None = None  # without a cache
        self.options = _only_last_logits(model)

    def step(self, tokens: Tensor) -> Tensor:
        if self.seen is not None:
            self.seen = torch.cat([self.seen, tokens], 1)
            found = self.model(input_ids=self.seen, use_cache=False, **self.options)
        elif self.past is not None:
            found = self.model(input_ids=tokens, past_key_values=self.past, use_cache=True, **self.options)
        else:
            found = self.model(input_ids=tokens, use_cache=True, **self.options)
            self.past = getattr(found, "past_key_values", None)
            layers = getattr(self.past, "layers", [None])
            if not all(map(_selects_rows, layers)):
                self.past, self.seen = None, tokens
        logits: Tensor = found.logits[:, -1]
        return logits

    def select(self, rows: Tensor) -> None:
        if self.seen is not None:
            self.seen = self.seen.index_select(0, rows)
        else:
            self.past.batch_select_indices(rows)


def _selects_rows(layer: object) -> bool:
    """Whether this layer of a cache selects rows of all that it has: the method of one with keys and with states of its
    own, which it inherits, leaves the states."""
    return hasattr(layer, "batch_select_indices") and not hasattr(layer, "recurrent_states")


def _only_last_logits(model: Any) -> Mapping[str, int]:
    """The argument that spares a model of transformers the logits [B, T, V] of a whole prompt, if its class has it."""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's class passes arguments on
    name = "logits_to_keep"
    return {name: 1} if name in inspect.signature(own.forward).parameters else {}


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: Sampling,
    max_length: int,
    listener: Callable[[int, int], object] = lambda number, token: None,
    ends_text: Collection[int] = (),
    vocab_size: int | None = None,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """Generate `num_tokens` tokens after each prompt, or fewer if `max_length` positions are used up or the text ends:
    with a token of `ends_text` or of what the configuration of a model of transformers says. It is not returned.

    Prompts must have at least one token. They are processed side by side: while shorter prompts are continued, longer
    ones are still read. The tokens sampled for a prompt depend on the seed and its number (of `numbers`, or its place),
    not on other prompts. `model` is a `LanguageModel` or a causal language model of transformers. `listener` gets the
    place of a prompt and its next token. `vocab_size`: only tokens below it are sampled, since a model may have more
    rows than its tokenizer has tokens.
    """
    device = next(model.parameters()).device
    generators = [_generator(sampling.seed, number) for number in numbers or range(len(prompts))]
    rows = [list(prompt) for prompt in prompts]
    ends = [min(len(prompt) + num_tokens, max_length) for prompt in prompts]
    steps = LanguageModelSteps(model) if isinstance(model, LanguageModel) else PretrainedSteps(model)
    last = _last_tokens(model).union(ends_text)
    active = list(range(len(rows)))
    length = min(map(len, rows))
    tokens = torch.tensor([row[:length] for row in rows], device=device)
    while True:
        logits = steps.step(tokens)[:, :vocab_size].cpu().double()  # all at once: a GPU's host waits for each copy
        for place, number in enumerate(active):
            if len(rows[number]) == length and length < ends[number]:
                token = draw(logits[place], sampling, generators[number])
                if token in last:
                    ends[number] = length
                    continue
                rows[number].append(token)
                listener(number, token)
        going = [place for place, number in enumerate(active) if length + 1 < ends[number]]
        if not going:
            break
        if len(going) < len(active):
            steps.select(torch.tensor(going, device=device))
            active = [active[place] for place in going]
        tokens = torch.tensor([[rows[number][length]] for number in active], device=device)
        length += 1
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def generate_in_batches(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: Sampling,
    max_length: int,
    batch_size: int,
    ends_text: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[list[int]]:
    """Yield what `generate` returns, in order; at most `batch_size` prompts of similar length are in memory."""
    for first in range(0, len(prompts), max(_WINDOW, batch_size)):
        window = range(first, min(first + max(_WINDOW, batch_size), len(prompts)))
        order, found = sorted(window, key=lambda number: len(prompts[number])), dict[int, list[int]]()
        for start in range(0, len(order), batch_size):
            own = order[start : start + batch_size]
            rows = [prompts[number] for number in own]
            more = generate(
                model, rows, num_tokens, sampling, max_length, ends_text=ends_text, vocab_size=vocab_size, numbers=own
            )
            found |= zip(own, more, strict=True)
        yield from (found[number] for number in window)


def _last_tokens(model: nn.Module) -> set[int]:
    """The tokens that end a text, from the configuration of a model of transformers."""
    config = getattr(model, "generation_config", None)
    return set() if config is None else set(eos_token_ids(vars(config)))


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token from logits [V], in float64 on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / sampling.temperature  # unlikely tokens alone overflow, to -inf
    if sampling.top_k is not None and sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p is not None:
        ordered, places = scaled.sort(descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scaled = scaled.index_fill(0, places[before >= sampling.top_p], -torch.inf)
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


def _generator(*key: int) -> torch.Generator:
    (seed,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed) & (2**63 - 1))
