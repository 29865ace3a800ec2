"""Translation and classification train like one plain torch loop on the same batches, in every parallel mode.

The reference is written again here, with torch's own loss and optimizer. Of the project it takes the models (which
tests/unit/models compares with torch.nn), their first weights, and which samples a batch has (tests/unit/data).
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jobs import relative_difference, steps, summary, weights
from torch import Tensor

from hvd_transformer.config import Config, load
from hvd_transformer.data.sampler import Replica
from hvd_transformer.data.tokenizers import PAD
from hvd_transformer.gradients.optimizer import names_without_decay
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import ExampleTask, PrepareContext

pytestmark = pytest.mark.distributed

STEPS = 7  # more than two epochs
WORDS = ["ein", "zwei", "drei", "rot", "blau", "Haus", "Hund", "geht", "nicht"]
TASKS = ("translation", "classification")
UNIFORM = "parallel.partition=uniform"  # elsewhere than in "pipeline", layers are not measured first
# World size, and how the work is cut. A step sees four batches of six samples in all of them.
MODES = {
    "alone": (1, "gloo", []),
    "pipeline": (1, "gloo", ["parallel.pipeline=4", "parallel.micro_batches=4", "parallel.recompute=always"]),
    "zero-bubble": (
        1, "gloo", ["parallel.pipeline=2", UNIFORM, "parallel.micro_batches=3", "parallel.schedule=zero_bubble"],
    ),
    "replicas": (2, "gloo", ["communication.embedding_rows=always", "communication.bucket_mb=0.01"]),
    "state": (
        2, "gloo", ["parallel.optimizer_shard=state", "parallel.pipeline=3", UNIFORM, "parallel.micro_batches=2"],
    ),
    "gradients": (2, "gloo", ["parallel.optimizer_shard=gradients", "communication.embedding_rows=never"]),
    "tensor": (2, "mpi", ["parallel.tensor=2", "parallel.vocab_parallel=true"]),
    "all": (
        4,
        "gloo",
        ["parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.pipeline=2", UNIFORM,
         "parallel.micro_batches=2", "parallel.optimizer_shard=state"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Pairs whose target is the source in capitals and turned, and texts labelled by which of two words they have."""
    root, rng = tmp_path_factory.mktemp("tasks"), random.Random(3)
    (root / "pairs").mkdir()
    (root / "texts").mkdir()
    for split, number in {"train": 61, "valid": 13, "test": 7}.items():
        rows = [rng.choices(WORDS, k=rng.randint(1, 9)) for _ in range(number)]
        turned = [" ".join(reversed(row)).upper() for row in rows]
        (root / "pairs" / f"{split}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        (root / "pairs" / f"{split}.en").write_text("".join(f"{row}\n" for row in turned))
        lines = ["label,text", *(f"{'good' if 'rot' in row else 'bad'},{' '.join(row)}" for row in rows)]
        (root / "texts" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return root


def settings(folder: Path, task: str) -> list[str]:
    source = {"translation": "pairs", "classification": "texts"}[task]
    special = {
        "translation": ["model.num_decoder_layers=3", "model.tie_embeddings=true", "data.batch_tokens=60"],
        "classification": ["data.class_weights={good: 2, bad: 0.5}", "training.best_metric=f1_macro"],
    }[task]
    return [
        f"task={task}", f"data.source={folder / source}", f"data.cache_dir={folder / 'cache'}", "data.workers=1",
        "data.tokenizer=basic_english", "model.num_layers=2", "model.d_model=16", "model.num_heads=2",
        "model.d_feedforward=24", "model.loss_chunk=5", "training.batch_size=6", "training.global_batch_size=24",
        "training.precision=fp64", "training.device=cpu", "training.label_smoothing=0.1", "training.epochs=100",
        f"training.max_steps={STEPS}", "training.log_every=1", "training.eval_every=100",
        "optimizer.lr_scaling=none", "optimizer.lr=0.01",
        "optimizer.schedule=constant", "optimizer.clip_norm=0.5", "optimizer.eps=1e-6", "optimizer.weight_decay=0.1",
        "translation.beam=2", *special,
    ]  # fmt: skip


def make_task(config: Config) -> ExampleTask:
    kind = task_class(config)
    data = kind.prepare(config, PrepareContext(map, lambda text: None, lambda: False))
    torch.manual_seed(config.seed)
    torch.set_default_dtype(torch.float64)
    try:
        task = kind(config, data, Replica(0, 1))
        assert isinstance(task, ExampleTask)
        assert next(task.model.parameters()).dtype == torch.float64  # made at first use
    finally:
        torch.set_default_dtype(torch.float32)
    return task


def losses(task: ExampleTask, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """The sum and what it is divided by, with torch's own cross-entropy."""
    if task.config.task == "translation":
        source, target = batch
        goals = target[:, 1:]
        logits = task.model(source, source != PAD, target[:, :-1])
        loss = F.cross_entropy(
            logits.flatten(0, 1), goals.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=0.1
        )
        return loss, int((goals != PAD).sum())
    tokens, labels = batch
    logits = task.model(tokens, tokens != PAD)
    weight = torch.tensor([{"good": 2.0, "bad": 0.5}[label] for label in task.labels], dtype=logits.dtype)
    return F.cross_entropy(logits, labels, weight=weight, reduction="sum", label_smoothing=0.1), len(labels)


def plan(task: ExampleTask) -> Iterator[list[tuple[Tensor, ...]]]:
    """A step's batches, four at a time; an epoch's last step has what is left."""
    epoch = 0
    while True:
        for step in task.batches.sampler(4, Replica()).epoch(epoch=epoch):
            yield [task.batch(epoch, items) for items in step.accumulation]
        epoch += 1


def reference(config: Config) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and the last weights of a plain loop."""
    task = make_task(config)
    free = names_without_decay(task.model)
    named = dict(task.model.named_parameters())
    groups = [
        {"params": [weight for name, weight in named.items() if name not in free], "weight_decay": 0.1},
        {"params": [named[name] for name in free], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=config.optimizer.betas, eps=1e-6)
    found, norms = [], []
    for _, batches in zip(range(STEPS), plan(task), strict=False):
        optimizer.zero_grad()
        parts = [losses(task, batch) for batch in batches]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)))
        optimizer.step()
        found.append(loss.item())
    return found, norms, {name: weight.detach() for name, weight in named.items()}


@pytest.fixture(scope="module")
def done(world, folder, tmp_path_factory) -> Path:
    """The folder of all runs."""
    root = tmp_path_factory.mktemp("runs")
    for name, (size, backend, words) in MODES.items():
        for task in TASKS:
            world(size, backend).train([*settings(folder, task), *words, f"output_dir={root / f'{task}-{name}'}"])
    return root


@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", TASKS)
def test_every_mode_trains_like_a_plain_loop(folder, done, task):
    wanted_losses, wanted_norms, wanted_weights = reference(load(overrides=settings(folder, task)))
    found, worst = {}, 0.0
    for name in MODES:
        run = done / f"{task}-{name}"
        rows = steps(run, "loss", "grad_norm")
        assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
        assert [loss for _, loss, _ in rows] == pytest.approx(wanted_losses, rel=1e-9), name
        assert [norm for _, _, norm in rows] == pytest.approx(wanted_norms, rel=1e-8), name
        worst = max(worst, relative_difference(weights(run), wanted_weights))
        assert worst < 1e-8, name
        found[name] = {key: value for key, value in summary(run).items() if key.startswith(("valid_", "test_"))}
    print(f"{task}: largest relative difference of a weight {worst:.1e}")
    # Decoding and counting are shared over ranks, and give the same.
    assert {"translation": "test_bleu_words", "classification": "test_f1_macro"}[task] in found["alone"]
    for name, metrics in found.items():
        assert metrics == pytest.approx(found["alone"], rel=1e-9), name
