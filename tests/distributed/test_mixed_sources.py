"""A mixture with documents kept apart trains alike on any number of ranks, however it is cut, and after a kill."""

import json
import random
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from jobs import SIZE, lines, relative_difference, steps, summary, weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

STEPS = 12
CUT = [
    "parallel.pipeline=2", "parallel.micro_batches=2", "parallel.recompute=always", "parallel.tensor=2",
    "parallel.vocab_parallel=true",
]  # fmt: skip
# hvd-train that is killed before its tenth step.
KILLED = """
import os, signal
from hvd_transformer.cli.train import main
from hvd_transformer.training.trainer import Trainer

plain = Trainer.queue

def queue(trainer, *words, **options):
    if trainer.state.step == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(trainer, *words, **options)

Trainer.queue = queue
main()
"""
# By name: world size, and how the work is cut.
MODES = {"three": (3, []), "cut": (2, CUT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root, rng = tmp_path_factory.mktemp("sources"), random.Random(6)
    for name, letters, count in (("a", "abc ", 300), ("b", "xyz ", 60)):
        rows = [json.dumps({"text": "".join(rng.choices(letters, k=rng.randint(1, 25)))}) for _ in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return root


def settings(folder: Path, run: Path) -> list[str]:
    """The second source is read again and again; an epoch ends after a few steps."""
    return [
        f"data.sources=[{{source: {folder}/a.jsonl, weight: 2, epochs: 0.1}}, {{source: {folder}/b.jsonl, weight: 1}}]",
        "data.document_mask=true", f"data.cache_dir={folder / 'cache'}", "data.tokenizer=char", "data.workers=1",
        "data.sequence_length=12", *(f"model.{key}={value}" for key, value in SIZE.items()),
        "training.device=cpu", "training.precision=fp64", "training.batch_size=2", "training.global_batch_size=12",
        f"training.max_steps={STEPS}", "training.epochs=100", "training.log_every=1", "training.eval_every=4",
        "training.best_metric=b_loss",
        "optimizer.lr_scaling=none", "communication.bucket_mb=0.01", "checkpoint.every_steps=2", f"output_dir={run}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(world, folder, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    world(1).train(settings(folder, run))
    return run


@pytest.fixture(scope="module")
def done(world, folder, tmp_path_factory) -> Path:
    """The folder of the runs of all modes."""
    root = tmp_path_factory.mktemp("runs")
    for mode, (size, words) in MODES.items():
        world(size).train([*settings(folder, root / mode), *words])
    return root


@pytest.mark.parametrize("mode", MODES)
def test_the_same_losses_on_any_number_of_ranks(mode: str, done: Path, alone: Path) -> None:
    assert max(epoch for _, epoch in steps(alone, "epoch")) == 3
    for found, wanted in zip(steps(done / mode, "loss"), steps(alone, "loss"), strict=True):
        assert found == (wanted[0], pytest.approx(wanted[1], rel=1e-9))
    for key in ("valid_loss", "test_loss", "valid_a_loss", "valid_b_loss", "test_b_loss"):
        assert summary(done / mode)[key] == pytest.approx(summary(alone)[key], rel=1e-9)
    assert relative_difference(weights(done / mode), weights(alone)) < 1e-8


def test_the_loss_of_one_source_chooses_the_best_checkpoint(alone: Path) -> None:
    losses = {line["step"]: line["valid_b_loss"] for line in lines(alone) if "valid_b_loss" in line}
    assert len(losses) > 1
    assert summary(alone)["best_step"] == min(losses, key=losses.get)


def test_a_killed_run_ends_like_an_unbroken_one(world, folder: Path, alone: Path, tmp_path: Path) -> None:
    """Bit for bit; the kill is in the third epoch, between two checkpoints."""
    run = tmp_path / "run"
    command = [BIN / "python", "-c", KILLED, *settings(folder, run)]
    killed = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [step for (step,) in steps(run)] == list(range(1, 10))
    world(1).train(settings(folder, run))
    for name in ("model", "optimizer"):
        found, wanted = (one / f"checkpoints/latest/{name}.safetensors" for one in (run, alone))
        assert found.read_bytes() == wanted.read_bytes()
    assert steps(run, "loss", "epoch") == steps(alone, "loss", "epoch")
