"""Ranks on cards of their own, over NCCL: they train as one rank on the CPU does."""

from pathlib import Path

import pytest
import torch
from jobs import relative_difference, steps, summary, tiny, weights, write_corpus
from worlds import Worlds

DEVICE = "cuda"
CARDS = torch.cuda.device_count()


def _has_nccl() -> bool:
    if CARDS < 2:  # Horovod is not imported for nothing
        return False
    try:
        import horovod.torch as hvd
    except ImportError:
        return False
    return bool(hvd.nccl_built())


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CARDS < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not _has_nccl(), reason="needs Horovod with NCCL"),
]

# The ranks and replicas of each, and settings. Without a second rank the second card has the second stage.
LAYOUTS = {
    "replicas": (2, 2, []),
    "small buckets": (2, 2, ["communication.bucket_mb=0.001", "communication.embedding_rows=always"]),
    "zero-1": (2, 2, ["parallel.optimizer_shard=state"]),
    "zero-2": (2, 2, ["parallel.optimizer_shard=gradients", "communication.bucket_mb=0.001"]),
    "tensor": (2, 1, ["parallel.tensor=2", "parallel.vocab_parallel=true"]),
    "tensor over Horovod": (2, 1, ["parallel.tensor=2", "communication.tensor_backend=horovod"]),
    "stages": (1, 1, ["parallel.pipeline=2", "parallel.micro_batches=4"]),
    "stages, zero bubble": (1, 1, ["parallel.pipeline=2", "parallel.schedule=zero_bubble", "parallel.micro_batches=4"]),
}
# Settings of each, and the tolerance. In fp32 updates and the next step are queued before a step is read.
PRECISIONS = {
    "fp64": (["training.precision=fp64"], 1e-9),
    "fp32": (["training.precision=fp32", "optimizer.name=sgd", "optimizer.lr=0.2", "optimizer.momentum=0.9"], 1e-4),
}
SAMPLES, LAST = 8, "training.max_steps=10"


def job(source: Path, folder: Path, replicas: int, precision: str, *words: str) -> list[str]:
    return [
        *tiny(source),
        f"training.device={DEVICE}",
        f"training.batch_size={SAMPLES // replicas}",
        *PRECISIONS[precision][0],
        "model.dropout=0",  # which depends on the round
        "optimizer.lr_scaling=none",
        "optimizer.schedule=constant",
        "training.text_samples=0",
        "checkpoint.every_steps=5",
        f"output_dir={folder}",
        *words,
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=2000)


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def on_the_cpu(source: Path, precision: str, tmp_path_factory: pytest.TempPathFactory, world: Worlds) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    world(1).train(job(source, run, 1, precision, LAST, "training.device=cpu"))
    return run


def check(run: Path, wanted: Path, tolerance: float) -> None:
    for (step, *found), (other, *expected) in zip(
        *(steps(each, "loss", "grad_norm") for each in (run, wanted)), strict=True
    ):
        assert step == other and found == pytest.approx(expected, rel=tolerance)
    assert relative_difference(weights(run), weights(wanted)) < tolerance
    assert summary(run)["valid_loss"] == pytest.approx(summary(wanted)["valid_loss"], rel=tolerance)


@pytest.mark.parametrize("starts", [[LAST], ["training.max_steps=5", LAST]], ids=["at once", "resumed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_cards_train_as_the_cpu_does(
    world: Worlds, source: Path, precision: str, on_the_cpu: Path, tmp_path: Path, layout: str, starts: list[str]
) -> None:
    ranks, replicas, words = LAYOUTS[layout]
    run = tmp_path / "run"
    world(ranks).train(*(job(source, run, replicas, precision, last, *words) for last in starts))
    check(run, on_the_cpu, PRECISIONS[precision][1])
