"""nanoGPT's setting for CPUs as a plain script of its own: `python -m benchmarks.nanogpt TEXT --seed 1 --every 50`.

The figures are those of its README ("I only have a macbook") and, where that says nothing, its defaults: block 64,
batch 12, 4 layers, 4 heads, width 128, no bias, no dropout, 2,000 iterations, AdamW with betas 0.9 and 0.99 and weight
decay 0.1 of matrices, clipping at 1, rate 1e-3 after 100 iterations of warm-up, then a cosine down to 1e-4. Samples
begin at random places. What our training has beyond that, it gets too: fused AdamW, freed memory that is kept.

Prints a line of JSON per evaluation: steps, seconds of training so far without any evaluation, and the loss over the
whole validation split, which is cut off as `data.split=[0.9, 0.1]` does it.
"""

import json
import math
import time
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from benchmarks.plain_model import PlainBlock, sum_of_losses
from hvd_transformer.data.text_files import boundary
from hvd_transformer.training.process import tune_memory

BLOCK, BATCH, LAYERS, HEADS, WIDTH = 64, 12, 4, 4, 128
ITERATIONS, WARMUP, RATE, LEAST_RATE = 2000, 100, 1e-3, 1e-4


class NanoGPT(nn.Module):
    """GPT-2's layers without biases; the output layer is the embedding (Radford et al. 2019)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(PlainBlock(WIDTH, HEADS, 4 * WIDTH, bias=False) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                residual = name.endswith("output.weight")
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight[: tokens.size(1)]
        return nn.functional.linear(self.norm(self.blocks(hidden)), self.tokens.weight)


def read(path: Path) -> tuple[Tensor, Tensor, int]:
    """The character numbers of both splits, and how many characters there are."""
    data = path.read_bytes()
    cut = boundary(path, round(0.9 * len(data)))
    texts = [part.decode() for part in (data[:cut], data[cut:])]
    numbers = {character: number for number, character in enumerate(sorted(set("".join(texts))))}
    train, valid = (torch.tensor([numbers[character] for character in text]) for text in texts)
    return train, valid, len(numbers)


def rate_at(iteration: int) -> float:
    """The learning rate of an iteration, from 0."""
    if iteration < WARMUP:
        return RATE * (iteration + 1) / (WARMUP + 1)
    done = (iteration - WARMUP) / (ITERATIONS - WARMUP)
    return LEAST_RATE + 0.5 * (RATE - LEAST_RATE) * (1 + math.cos(math.pi * done))


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor) -> float:
    """The mean over all windows of a block: every token but the first is a target once."""
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    inputs, targets = tokens[:whole].view(-1, BLOCK), tokens[1 : whole + 1].view(-1, BLOCK)
    total = sum(
        float(sum_of_losses(model(part), goal)) for part, goal in zip(inputs.split(64), targets.split(64), strict=True)
    )
    if whole < len(tokens) - 1:
        total += float(sum_of_losses(model(tokens[None, whole:-1]), tokens[None, whole + 1 :]))
    return total / (len(tokens) - 1)


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seed", default=1, show_default=True)
@click.option("--every", default=50, show_default=True, type=click.IntRange(1), help="Steps between evaluations.")
@click.option("--iterations", default=ITERATIONS, show_default=True, type=click.IntRange(1), help="Stop after these.")
def main(text: Path, seed: int, every: int, iterations: int) -> None:
    """Train nanoGPT's model on a text."""
    tune_memory()
    torch.manual_seed(seed)
    train, valid, vocab_size = read(text)
    model = NanoGPT(vocab_size)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), fused=True)
    parameters, span, seconds = [*matrices, *others], torch.arange(BLOCK + 1), 0.0
    began = time.perf_counter()
    for iteration in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(iteration)
        samples = train[torch.randint(len(train) - BLOCK, (BATCH, 1)) + span]
        loss = sum_of_losses(model(samples[:, :-1]), samples[:, 1:]) / (BATCH * BLOCK)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps = iteration + 1
        if steps % every == 0 or steps == iterations:
            seconds += time.perf_counter() - began
            found = validation_loss(model, valid)
            print(json.dumps({"step": steps, "seconds": seconds, "loss": found}), flush=True)
            began = time.perf_counter()


if __name__ == "__main__":
    main()
