"""Real text, two ranks: the test perplexity is that of a plain single-process torch script with the same settings."""

import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

NUM_STEPS, BATCH, LENGTH, WIDTH, RATE, MIN_FREQUENCY = 250, 16, 35, 32, 5e-3, 5


def plain_perplexity(tokens: dict[str, torch.Tensor], vocab_size: int) -> float:
    """torch.nn layers, torch.optim, shuffled windows by torch.randperm, one process."""
    torch.manual_seed(11)
    embedding = nn.Embedding(vocab_size, WIDTH)
    nn.init.normal_(embedding.weight, std=0.02)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    parameters = [*embedding.parameters(), *encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = 40
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    place = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    positions = torch.stack([place.sin(), place.cos()], dim=-1).flatten(1)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def loss_sum(rows: torch.Tensor) -> torch.Tensor:
        size = rows.size(1) - 1
        hidden = embedding(rows[:, :-1]) * math.sqrt(WIDTH) + positions[:size]
        logits = encoder(hidden, mask[:size, :size]) @ embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    train = tokens["train"]
    windows = train[: (len(train) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    order = torch.cat([torch.randperm(len(windows)) for _ in range(-(-NUM_STEPS * BATCH // len(windows)))])
    for step in range(NUM_STEPS):
        rows = windows[order[step * BATCH : (step + 1) * BATCH]]
        optimizer.zero_grad()
        (loss_sum(rows) / rows[:, 1:].numel()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    test, total = tokens["test"], 0.0
    with torch.no_grad():
        for first in range(0, len(test) - 1, LENGTH * 64):
            for row in test[first : first + LENGTH * 64 + 1].split(LENGTH * 64 + 1):
                whole = (len(row) - 1) // LENGTH * LENGTH
                if whole:
                    total += loss_sum(row[: whole + 1].unfold(0, LENGTH + 1, LENGTH)).item()
                if whole < len(row) - 1:
                    total += loss_sum(row[whole:][None]).item()
    return math.exp(total / (len(test) - 1))


def torchtext_tokens(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """torchtext's own tokenizer, line by line, and its own vocabulary of the training split."""
    from torchtext.data.utils import get_tokenizer
    from torchtext.vocab import Vocab

    tokenizer = get_tokenizer("basic_english")
    words = {}
    for split in ("train", "valid", "test"):
        with (folder / f"{split}.txt").open(encoding="utf-8") as file:
            words[split] = [word for line in file for word in tokenizer(line)]
    vocabulary = Vocab(Counter(words["train"]), min_freq=MIN_FREQUENCY, specials=["<unk>"])
    tokens = {split: torch.tensor([vocabulary[word] for word in words[split]]) for split in words}
    return tokens, len(vocabulary)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_perplexity_is_that_of_a_plain_torch_script(world, shared_data, tmp_path):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for split, name in {"train": "valid", "test": "test"}.items():
        (folder / f"{split}.txt").symlink_to(shared_data / "wikitext-2" / f"{name}.txt")
    with (folder / "test.txt").open(encoding="utf-8") as file:
        (folder / "valid.txt").write_text("".join(islice(file, 300)), encoding="utf-8")
    settings = [
        "seed=5", f"model.d_model={WIDTH}", "model.num_heads=2", "model.num_layers=2", "model.d_feedforward=128",
        "data.tokenizer=basic_english", f"data.min_frequency={MIN_FREQUENCY}",
        f"data.sequence_length={LENGTH}", f"training.batch_size={BATCH // 2}",
        f"training.max_steps={NUM_STEPS}", "training.epochs=10", "training.eval_batch_size=64",
        f"training.eval_every={NUM_STEPS}", f"optimizer.lr={RATE}", "optimizer.lr_scaling=none",
        "optimizer.schedule=constant", "optimizer.warmup_steps=40", "optimizer.weight_decay=0",
    ]  # fmt: skip
    where = [f"data.source={folder}", f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}"]
    world(2).train([*where, *settings])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    tokens, vocab_size = torchtext_tokens(folder)
    index = json.loads(next((tmp_path / "cache" / "prepared").glob("*/index.json")).read_text())
    assert {split: entry["tokens"] for split, entry in index["splits"].items()} == {
        split: len(numbers) for split, numbers in tokens.items()
    }
    assert index["vocab_size"] == vocab_size
    expected = plain_perplexity(tokens, vocab_size)
    print(f"test perplexity: {summary['test_perplexity']:.2f} on two ranks, {expected:.2f} plain")
    assert summary["test_perplexity"] == pytest.approx(expected, rel=0.02)
