"""Every way to start `hvd-train` leaves the same complete run directory, and rank 0 alone speaks."""

import re

import pytest
import torch
import yaml
from commands import command
from jobs import TRAIN, lines, relative_difference, state, steps, summary, tiny, weights, write_corpus
from safetensors.torch import load_file

from hvd_transformer.checkpoint import manifest

pytestmark = pytest.mark.distributed

STEPS = 50
SUMMARY = {
    "status", "steps", "samples", "seconds", "tokens_per_second", "world", "dp", "tp", "pp", "parameters", "train_loss",
    "valid_loss", "valid_perplexity", "test_loss", "test_perplexity", "best_step", "env",
}  # fmt: skip
TRAINING_LINE = {"step", "epoch", "samples", "loss", "lr", "grad_norm", "tokens_per_second", "milliseconds_per_step"}
COSTS = {"peak_memory_bytes", "data_wait_milliseconds"}  # of the steps before: not in the first line
CHECKPOINT = {"model.safetensors", "optimizer.safetensors", "state.json", "vocabulary.json", "MANIFEST.json"}
WAYS = [
    pytest.param(2, "gloo", "gloo", id="gloo"),
    pytest.param(2, "mpi", "mpi", id="mpi", marks=pytest.mark.slow),
    pytest.param(2, "mpirun", "mpi", id="mpirun"),
    pytest.param(1, "", "none", id="alone"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=12000)


@pytest.mark.parametrize(("size", "launcher", "backend"), WAYS)
def test_the_run_directory_is_complete(ranks, corpus, tmp_path, size, launcher, backend):
    run = tmp_path / "run"
    settings = [*tiny(corpus), f"training.max_steps={STEPS}", "training.eval_every=20", "checkpoint.every_steps=15"]
    result = ranks(size, [TRAIN, f"output_dir={run}", *settings], backend=launcher)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.jsonl", "summary.json", "tensorboard", "logs", "checkpoints", "report.html",
        "loss.png", "learning_rate.png", "throughput.png",
    }  # fmt: skip
    _check_metrics(run, size)
    _check_summary(run, size, backend)
    _check_checkpoints(run)
    assert {path.name for path in (run / "logs").iterdir()} == {f"rank-{rank:03d}.log" for rank in range(size)}
    assert all(f"rank {rank} of {size}" in (run / f"logs/rank-{rank:03d}.log").read_text() for rank in range(size))
    assert (run / "report.html").read_text().count("<img") == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in run.glob("*.png"))
    _check_tensorboard(run)
    _check_output(result.stdout, result.stderr, size, run)
    if size == 1:
        again = command("hvd-train", "--config", run / "config.yaml", f"output_dir={tmp_path / 'again'}")
        assert again.returncode == 0, again.stderr
        assert relative_difference(weights(tmp_path / "again"), weights(run)) == 0
        assert steps(tmp_path / "again", "loss", "lr") == steps(run, "loss", "lr")


def _check_metrics(run, size):
    training = [line for line in lines(run) if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    assert all(line.keys() >= TRAINING_LINE and None not in line.values() for line in training)
    costs = COSTS | ({"communication_wait_milliseconds"} if size > 1 else set())
    assert all(line.keys() >= costs for line in training[1:]) and not training[0].keys() & costs
    assert [line["samples"] for line in training][:3] == [8 * size, 16 * size, 24 * size]
    assert training[-1]["loss"] < training[0]["loss"]
    assert [line["step"] for line in lines(run) if "valid_loss" in line] == [20, 40, STEPS]


def _check_summary(run, size, backend):
    content = summary(run)
    assert content.keys() >= SUMMARY
    assert None not in content.values()
    assert [content[key] for key in ("status", "steps", "samples")] == ["finished", STEPS, 8 * size * STEPS]
    assert [content[key] for key in ("world", "dp", "tp", "pp", "backend")] == [size, size, 1, 1, backend]
    assert content["parameters"] == sum(weight.numel() for weight in weights(run).values())
    assert content["train_loss"] == steps(run, "loss")[-1][1]
    assert content["test_perplexity"] == pytest.approx(torch.tensor(content["test_loss"]).exp().item(), rel=1e-6)


def _check_checkpoints(run):
    folder = run / "checkpoints"
    best = summary(run)["best_step"]
    losses = {line["step"]: line["valid_loss"] for line in lines(run) if "valid_loss" in line}
    bests = [step for step in losses if losses[step] == min(value for at, value in losses.items() if at <= step)]
    assert best == bests[-1]
    kept = {best, *sorted({15, 30, 45, STEPS, *bests})[-3:]}  # checkpoint.keep_last=3
    assert {path.name for path in folder.iterdir()} == {"latest", "best", *(f"step-{step:08d}" for step in kept)}
    assert (folder / "latest").resolve().name == f"step-{STEPS:08d}"
    assert (folder / "best").resolve().name == f"step-{best:08d}"
    for path in folder.glob("step-*"):
        assert {file.name for file in path.iterdir()} == CHECKPOINT
        manifest.verify(path)
    assert state(run)["position"]["step"] == STEPS
    assert {"exp_avg." + name for name in weights(run)} < load_file(folder / "latest/optimizer.safetensors").keys()
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["max_steps"] == STEPS


def _check_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(step, pytest.approx(loss)) for step, loss in steps(run, "loss")]
    assert [event.step for event in events.Scalars("valid_loss")] == [20, 40, STEPS]


def _check_output(out, err, size, run):
    """One headline, one end, nothing twice; under horovodrun every line is rank 0's."""
    assert err == ""
    said = [re.sub(r"^\[(1,)?\d+\]<\w+>:", "", line) for line in out.splitlines()]
    assert sum(line.startswith("language_model: ") for line in said) == 1
    assert sum(line.startswith("done: ") for line in said) == 1
    assert said[-1] == f"run directory: {run}"
    assert len(said) == len(set(said))
    assert not re.search(r"^\[(1,)?[1-9]\d*\]", out, re.MULTILINE)
