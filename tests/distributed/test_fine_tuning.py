"""Models of Hugging Face folders are fine-tuned on two ranks as by a plain torch loop on the same samples."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fine_tuning import SEED, SETTINGS, difference, reference
from huggingface import WORDS, write_bert, write_gpt
from jobs import steps, summary, weights
from torch import Tensor, nn

from hvd_transformer.data.batches import LengthBuckets
from hvd_transformer.data.length_order import LengthOrder
from hvd_transformer.data.sampler import Permutation, Replica

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

STEPS, LENGTH = 14, 12
LABELS = ["bad", "good"]
# A step sees four batches of six samples; by name: world size, and how the work is cut.
MODES = {
    "alone": (1, []),
    "replicas": (2, ["communication.bucket_mb=0.01"]),
    "shards": (2, ["parallel.optimizer_shard=gradients", "parallel.micro_batches=2"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The two models, reviews, and a text."""
    root, rng = tmp_path_factory.mktemp("pretrained"), random.Random(3)
    write_bert(root / "bert")
    write_gpt(root / "gpt")
    write_bert(root / "dropping", dropout=0.3)
    for kind in ("texts", "text"):
        (root / kind).mkdir()
    for split, number in {"train": 61, "valid": 13, "test": 7}.items():
        rows = [rng.choices(WORDS, k=rng.randint(1, 9)) for _ in range(number)]
        table = ["label,text", *(f"{'good' if 'good' in row else 'bad'},{' '.join(row)}" for row in rows)]
        (root / "texts" / f"{split}.csv").write_text("\n".join(table) + "\n")
        (root / "text" / f"{split}.txt").write_text("\n".join(" ".join(row) for row in rows * 3) + "\n")
    return root


def settings(folder: Path, model: str, source: str) -> list[str]:
    task = {"texts": "classification", "text": "language_model"}[source]
    return [
        f"task={task}", f"model.pretrained={folder / model}", f"data.source={folder / source}",
        f"data.cache_dir={folder / 'cache'}", f"data.sequence_length={LENGTH}", "training.batch_size=6",
        "training.global_batch_size=24", "training.label_smoothing=0.1", f"training.max_steps={STEPS}", *SETTINGS,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def done(world, folder, tmp_path_factory) -> Path:
    """The folder of all runs."""
    root = tmp_path_factory.mktemp("runs")
    for name, (size, words) in MODES.items():
        for model, source in (("bert", "texts"), ("gpt", "text"), ("dropping", "texts")):
            world(size).train([*settings(folder, model, source), *words, f"output_dir={root / f'{model}-{name}'}"])
    return root


def of_reviews(folder: Path, model: nn.Module) -> Iterator[list[tuple[Tensor, int]]]:
    """The transformers way: tokenized and padded by its tokenizer, its model's logits, torch's loss."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    rows = [line.split(",") for line in (folder / "texts" / "train.csv").read_text().splitlines()[1:]]
    lengths = torch.tensor([len(tokenizer(text)["input_ids"]) for _, text in rows]).numpy()
    batches = LengthBuckets(LengthOrder.of(lengths), 6, None, SEED)
    epoch = 0
    while True:
        for step in batches.sampler(4, Replica()).epoch(epoch=epoch):
            parts = []
            for [unit] in step.accumulation:
                chosen = [rows[number] for number in batches.item(epoch, unit)]
                inputs = tokenizer([text for _, text in chosen], padding=True, return_tensors="pt")
                labels = torch.tensor([LABELS.index(label) for label, _ in chosen])
                loss = F.cross_entropy(model(**inputs).logits, labels, reduction="sum", label_smoothing=0.1)
                parts.append((loss, len(labels)))
            yield parts
        epoch += 1


def of_text(folder: Path, model: nn.Module) -> Iterator[list[tuple[Tensor, int]]]:
    """Windows of the text's tokens in shuffled order, 24 a step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "gpt")
    text = (folder / "text" / "train.txt").read_text()
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    count = (len(tokens) - 1) // LENGTH - 1
    epoch = 0
    while True:
        order = Permutation(count, (SEED, epoch))[np.arange(count)].tolist()
        offset = shift(epoch, len(tokens) - count * LENGTH)
        for first in range(0, count, 24):
            starts = [offset + number * LENGTH for number in order[first : first + 24]]
            windows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
            logits = model(input_ids=windows[:, :-1]).logits
            goals = windows[:, 1:].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), goals, reduction="sum", label_smoothing=0.1)
            yield [(loss, goals.numel())]
        epoch += 1


def shift(epoch: int, spare: int) -> int:
    """Where an epoch's first window begins."""
    return int(np.random.SeedSequence((SEED, epoch, 1)).generate_state(1)[0]) % spare


CASES = {
    "bert": ("AutoModelForSequenceClassification", {"num_labels": 2}, of_reviews),
    "gpt": ("AutoModelForCausalLM", {}, of_text),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_fine_tuning_is_a_plain_loops(folder, done, name):
    kind, options, parts_of = CASES[name]
    make: Callable = getattr(transformers, kind).from_pretrained
    torch.manual_seed(SEED)  # of the new head
    model = make(folder / name, dtype=torch.float64, **options)
    wanted_losses, wanted = reference(model, parts_of(folder, model), STEPS)
    for mode in MODES:
        run = done / f"{name}-{mode}"
        assert [loss for _, loss in steps(run, "loss")] == pytest.approx(wanted_losses, rel=1e-9), mode
        found = difference(weights(run), wanted)
        assert found < 1e-9, mode
        print(f"{name}, {mode}: largest difference of a weight {found:.1e}")


def test_what_is_dropped_does_not_hang_on_the_ranks(done):
    """A run with dropout, which transformers draws from torch's own generator, is the same on one rank and on two."""
    one, two, shards = (weights(done / f"dropping-{mode}") for mode in ("alone", "replicas", "shards"))
    assert difference(two, one) < 1e-9
    assert difference(weights(done / "bert-alone"), one) > 1e-3  # it does drop
    assert difference(shards, one) > 1e-3  # other micro-batches draw others


def test_metrics_are_the_same_on_one_rank_and_on_two(done):
    for name, metric in (("bert", "test_f1_macro"), ("gpt", "test_perplexity")):
        one, two = (summary(done / f"{name}-{mode}") for mode in ("alone", "replicas"))
        assert one[metric] == pytest.approx(two[metric], rel=1e-9)


def test_a_checkpoint_is_a_hugging_face_folder(folder, done):
    """As transformers reads it, with the names of the labels."""
    best = done / "bert-replicas" / "checkpoints" / "latest"
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(best, output_loading_info=True)
    assert not any(info.values())
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.architectures == ["BertForSequenceClassification"]
    assert difference(dict(model.named_parameters()), weights(done / "bert-replicas")) < 1e-6
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(place) for place in (best, folder / "bert"))
    assert ours("the room was good")["input_ids"] == theirs("the room was good")["input_ids"]
    assert "pretrained" not in json.loads((best / "config.json").read_text())
