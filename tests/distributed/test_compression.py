"""Compressed gradients over real ranks: replicas stay equal, which each run checks, and losses stay near."""

import pytest
from jobs import steps, summary, tiny, write_corpus

pytestmark = pytest.mark.distributed

SOME = ("none", "int8", "int4", "powersgd")
ALL = (*SOME, "fp16", "fp16_fp32_sum", "auto")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "backend", "formats"),
    [
        (3, "gloo", SOME),
        pytest.param(3, "gloo", ALL, marks=SLOW),
        pytest.param(2, "mpi", ALL, marks=SLOW),
        pytest.param(3, "mpi", ALL, marks=SLOW),
    ],
)
def test_every_format_trains_with_pipeline_accumulation_and_rows(world, tmp_path, size, backend, formats):
    corpus = write_corpus(tmp_path / "text", train=1200)
    words = [
        *tiny(corpus),
        "parallel.pipeline=2",
        "parallel.partition=uniform",
        "parallel.micro_batches=2",
        "training.accumulation=2",
        "training.batch_size=4",
        "training.max_steps=12",
        "training.epochs=9",
        "communication.bucket_mb=0.005",
        "communication.embedding_rows=always",
        "optimizer.lr=0.005",
    ]
    runs = {name: [*words, f"communication.compression={name}", f"output_dir={tmp_path / name}"] for name in formats}
    runs["powersgd"].append("communication.powersgd_rank=1")
    world(size, backend).train(*runs.values())
    losses = {name: [loss for _, loss in steps(tmp_path / name, "loss")] for name in formats}
    exact = losses["none"]
    assert exact[-1] < exact[0]
    for name in formats:
        assert losses[name] == pytest.approx(exact, rel=0.05 if name in ("powersgd", "int4", "auto") else 0.01), name
        assert (losses[name] == exact) == (name == "none" or summary(tmp_path / name)["compression"] == "none")
        assert summary(tmp_path / name)["compression"] == name or name == "auto"
