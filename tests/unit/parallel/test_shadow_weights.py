"""Weights in 16 bits beside those in 32: products take them, and nobody can tell but by the time."""

import gc
import weakref

import pytest
import torch
from small_job import run, settings, trainer, weights

from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.parallel import engine

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = [
    [],
    ["training.accumulation=2", "model.tie_embeddings=false"],
    ["parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=2", "parallel.recompute=always"],
    ["optimizer.ema=0.6"],
]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_training_is_that_with_a_cast_at_each_call(words: list[str], precision: str, monkeypatch) -> None:
    words = [*words, f"training.precision={precision}", "model.num_layers=2"]
    own = trainer(settings(*words))
    linears = [module for module in own.task.model.modules() if isinstance(module, WeightGradLayer)]
    assert linears and all(module.shadow is not None for module in linears)
    losses = run(own)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "add_shadows", lambda *_: None)
        plain = trainer(settings(*words))
    assert run(plain) == losses
    assert own.evaluate("valid") == plain.evaluate("valid")
    wanted = weights(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights(own).items())
    for job in (own, plain):
        job.close()


def test_old_ones_would_train_otherwise(monkeypatch) -> None:
    job = trainer(settings("training.precision=bf16"))
    run(job, 1)
    monkeypatch.setattr(GradBuffer, "parameters_changed", lambda self: None)
    stale = run(job, 4)
    job.close()
    fresh = trainer(settings("training.precision=bf16"))
    monkeypatch.undo()
    assert run(fresh, 5)[1:] != stale
    fresh.close()


def test_full_precision_has_none() -> None:
    job = trainer(settings())
    assert all(buffer.shadow is None for buffer in job.engine.buffers)
    job.close()


def test_a_closed_job_leaves_no_memory() -> None:
    """The hooks of parameters are not seen by Python's collector: with them a second trainer would find less room."""
    job = trainer(settings("training.precision=bf16"))
    run(job, 1)
    left = [weakref.ref(buffer) for buffer in job.engine.buffers]
    job.close()
    del job
    gc.collect()
    assert not any(buffer() for buffer in left)
