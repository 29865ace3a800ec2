"""Updates that are queued before the host knows norm and loss, as on a GPU: the same training, bit for bit."""

import math
from collections.abc import Callable

import pytest
import torch
from small_job import run, settings, trainer, weights

from hvd_transformer.training import step_stats
from hvd_transformer.training import trainer as trainer_module
from hvd_transformer.training.trainer import Trainer
from hvd_transformer.training.training_step import Diverged

pytestmark = pytest.mark.usefixtures("one_thread")


def ahead(*words: str) -> Trainer:
    job = trainer(settings(*words))
    assert job.engine.takes_factor
    job.updates_ahead = True
    return job


@pytest.mark.parametrize("queued", [True, False])
def test_updates_are_queued_ahead_where_the_device_has_a_queue(queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "has_streams", lambda device: queued)
    assert trainer(settings()).updates_ahead == queued


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["optimizer.clip_norm=0.05"],
        ["optimizer.clip_norm=null", "optimizer.name=adam"],
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.clip_norm=0.2"],
        ["training.precision=bf16", "parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=2"],
        ["training.precision=fp16"],
    ],
    ids=" ".join,
)
def test_the_order_changes_no_bit(words: list[str]) -> None:
    plain, early = trainer(settings(*words)), ahead(*words)
    assert run(early) == run(plain)
    wanted = weights(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights(early).items())
    assert early.state.updates == plain.state.updates
    for job in (plain, early):
        job.close()


def poison(job: Trainer, value: float) -> None:
    """The next step's loss and gradients are not finite."""
    head = job.task.layers[-1].module
    with torch.no_grad():
        head.norm.weight[0] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_diverges_changes_nothing(value: float) -> None:
    job = ahead()
    run(job, 3)
    poison(job, value)
    before = weights(job)
    state = [{name: flat.clone() for name, flat in own.items()} for own in job.engine.optimizer_state()]
    with pytest.raises(Diverged, match="step 4"):
        run(job, 1)
    for name, weight in weights(job).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0, equal_nan=True)
    for own, was in zip(job.engine.optimizer_state(), state, strict=True):
        assert all(torch.equal(flat, was[name]) for name, flat in own.items())
    job.close()


def test_an_overflow_in_float16_is_skipped_and_halves_the_scale() -> None:
    found = []
    for early in (False, True):
        job = trainer(settings("training.precision=fp16"))
        job.updates_ahead = early
        job.loss_scaler.scale = 2.0**24  # the first steps overflow
        losses = run(job)
        found.append((losses, job.loss_scaler.scale, job.state.updates, weights(job)))
        job.close()
    (losses, scale, updates, wanted), (own, own_scale, own_updates, own_weights) = found
    assert own == losses and (own_scale, own_updates) == (scale, updates)
    assert scale < 2.0**24 and 0 < updates < len(losses)
    assert all(torch.equal(weight, wanted[name]) for name, weight in own_weights.items())


@pytest.mark.parametrize("word", ["optimizer.name=muon", "optimizer.ema=0.9", "training.precision=fp64"])
def test_what_cannot_be_left_out_on_the_device_waits_for_the_host(word: str) -> None:
    job = trainer(settings(word))
    assert not job.engine.takes_factor
    job.close()


def test_the_host_reads_when_the_update_is_queued(monkeypatch) -> None:
    """On a GPU that is what keeps it busy: nothing is read from it before."""
    job, order = ahead(), []
    update, read = job.engine.update, step_stats.start_copy

    def noted_copy(values: torch.Tensor) -> Callable[[], torch.Tensor]:
        wait = read(values)
        return lambda: (order.append("read"), wait())[1]

    monkeypatch.setattr(job.engine, "update", lambda *given: (order.append("update"), update(*given))[1])
    monkeypatch.setattr(step_stats, "start_copy", noted_copy)
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda own, plain=plain: (order.append("read"), plain(own))[1])
    run(job, 2)
    monkeypatch.undo()
    assert order == ["update", "read", "read"] * 2  # the copy, and its numbers
    job.close()
