"""`tutorial-small` against the PyTorch tutorial "Training Transformer models using Distributed Data Parallel and
Pipeline Parallelism", in plain torch: its initial weights, and its training loop on one rank."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import output as run
from plain_transformer import PlainTransformer
from torch import Tensor, nn

from hvd_transformer.config import load
from hvd_transformer.models.language_model import LanguageModel

STEPS, LENGTH, SEED, WORDS = 50, 35, 4, 300


@pytest.mark.parametrize(("columns", "pieces"), [(2, 1), pytest.param(20, 8, marks=pytest.mark.slow)])
def test_the_tutorials_loop_has_the_losses_of_the_preset(
    tmp_path: Path, in_float64: None, columns: int, pieces: int
) -> None:
    """Three epochs of 21 batches, the last one of four rows, so that the rate falls twice."""
    rng = random.Random(2)
    words = [f"word{int(rng.random() ** 3 * WORDS)}" for _ in range(columns * (20 * LENGTH + 5))]
    lines = [" ".join(words[first : first + 14]) for first in range(0, len(words), 14)]
    for split, some in {"train": lines, "valid": lines[:9], "test": lines[:9]}.items():
        (tmp_path / f"{split}.txt").write_text("".join(f"{line}\n" for line in some))
    run(
        "hvd-train", "--preset", "tutorial-small", f"data.source={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'run'}", "data.workers=1", "model.dropout=0", "optimizer.warmup_steps=0",
        "parallel.pipeline=1", "training.precision=fp64", f"training.max_steps={STEPS}", "training.log_every=1",
        "training.eval_every=1000", "training.device=cpu", "checkpoint.every_steps=none", f"seed={SEED}",
        f"training.batch_size={columns}", f"parallel.micro_batches={pieces}",
    )  # fmt: skip
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in metrics if "loss" in line]
    wanted = tutorial_losses(tmp_path / "train.txt", columns)
    largest = max(abs(own - other) for own, other in zip(found, wanted, strict=True))
    print(f"losses from {wanted[0]:.3f} to {wanted[-1]:.3f}; largest difference {largest:.1e}")
    assert largest < 1e-6


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Of the reference; the command has its own precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tutorial_losses(path: Path, columns: int) -> list[float]:
    """The tutorial's loop, with its causal mask applied, and targets in the order of the outputs."""
    num_words, tokens = torchtext_tokens(path)
    config = load("tutorial-small", overrides=["model.dropout=0"]).model
    torch.manual_seed(SEED)
    first = LanguageModel(num_words, config)  # what a run with this seed begins with
    model = PlainTransformer(num_words, config).load(dict(first.named_parameters()))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    rows = len(tokens) // columns
    table = tokens[: rows * columns].view(columns, rows)
    losses: list[float] = []
    while True:
        for start in range(0, rows - 1, LENGTH):
            piece = table[:, start : start + LENGTH + 1]
            optimizer.zero_grad()
            loss = criterion(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                return losses
        scheduler.step()


def torchtext_tokens(path: Path) -> tuple[int, Tensor]:
    """The number of words, and the text as token numbers: as torchtext does both."""
    from torchtext.data.utils import get_tokenizer
    from torchtext.vocab import Vocab

    tokenizer = get_tokenizer("basic_english")
    words = [word for line in path.read_text().splitlines() for word in tokenizer(line)]
    vocabulary = Vocab(Counter(words), specials=["<unk>"])
    return len(vocabulary), torch.tensor([vocabulary[word] for word in words])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_initial_weights_are_distributed_as_the_tutorials(norm: str) -> None:
    """Each weight has the same bound and spread; zeros and ones are the same."""
    config = load("tutorial-small", overrides=[f"model.norm={norm}"]).model
    torch.manual_seed(1)
    ours = dict(LanguageModel(WORDS, config).named_parameters())
    plain = PlainTransformer(WORDS, config)  # its blocks begin as torch has them
    for weight in (plain.embedding.weight, plain.head.weight):
        nn.init.uniform_(weight, -0.1, 0.1)
    nn.init.zeros_(plain.head.bias)
    theirs = plain.by_our_names()
    assert theirs.keys() == ours.keys()
    num_drawn = 0
    for name, weight in theirs.items():
        own, wanted = ours[name].detach(), weight.detach()
        if wanted.unique().numel() == 1:
            assert torch.equal(own, wanted), name
            continue
        num_drawn += 1
        few = wanted.ndim == 1  # 200 values, not 40,000
        assert own.abs().max().item() == pytest.approx(wanted.abs().max().item(), rel=0.05 if few else 0.001), name
        assert own.std().item() == pytest.approx(wanted.std().item(), rel=0.2 if few else 0.02), name
        assert abs(own.mean().item()) < 4 * wanted.std().item() / own.numel() ** 0.5, name
    assert num_drawn == 2 + config.num_layers * 6  # of a block: four matrices, two biases
