"""The loop equals a plain torch script step by step; overflows are left out, and what diverges is told."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_world import FakeWorld
from plain_transformer import PlainTransformer
from small_job import SPLITS, VOCABULARY, run, settings, trainer, weights
from torch import Tensor, nn

from hvd_transformer.config import Config
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.training.state import TrainState, Wishes
from hvd_transformer.training.trainer import Trainer
from hvd_transformer.training.training_step import Diverged

Pair = tuple[Tensor, Tensor]


def column_steps(config: Config) -> Iterator[tuple[int, list[Pair]]]:
    """The PyTorch tutorial's batches, `accumulation` a step, epoch after epoch."""
    columns, length = config.training.batch_size, config.data.sequence_length
    text = torch.from_numpy(SPLITS["train"].astype("int64"))
    source = text[: len(text) // columns * columns].view(columns, -1).t()
    batches = []
    for place in range(0, len(source) - 1, length):
        size = min(length, len(source) - 1 - place)
        batches.append((source[place : place + size].t(), source[place + 1 : place + 1 + size].t()))
    for epoch in range(config.training.epochs):
        for first in range(0, len(batches), config.training.accumulation):
            yield epoch, batches[first : first + config.training.accumulation]


def window_steps(config: Config, job: Trainer) -> Iterator[tuple[int, list[Pair]]]:
    """The windows of each epoch in their order (`test_batches.py` looks at that), so many a step."""
    size, count = config.training.batch_size * config.training.accumulation, job.task.samples.num_items
    for epoch in range(config.training.epochs):
        for first in range(0, count, size):
            yield epoch, [tuple(job.task.samples.batch(epoch, range(first, min(first + size, count))))]


def plain_training(
    config: Config, model: PlainTransformer, steps: Iterator[tuple[int, list[Pair]]]
) -> tuple[list[float], list[float]]:
    """What anyone would write by hand; losses and gradient norms."""
    chosen = config.optimizer
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    spared = [
        weight
        for weight in model.parameters()
        if weight.ndim == 1 or any(weight is embedding for embedding in embeddings)
    ]
    matrices = [weight for weight in model.parameters() if not any(weight is other for other in spared)]
    groups = [
        {"params": matrices, "weight_decay": chosen.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    if chosen.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=chosen.lr, momentum=chosen.momentum)
    elif chosen.name == "adam":
        optimizer = torch.optim.Adam(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
    else:
        optimizer = torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
    losses, norms = [], []
    total_steps = config.training.max_steps
    for step, (epoch, pairs) in zip(range(total_steps), steps, strict=False):
        optimizer.zero_grad()
        count = sum(targets.numel() for _, targets in pairs)
        loss = 0.0
        for inputs, targets in pairs:
            part = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / count
            part.backward()
            loss += part.item()
        limit = math.inf if chosen.clip_norm is None else chosen.clip_norm
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        warm = min(1.0, (step + 1) / chosen.warmup_steps) if chosen.warmup_steps else 1.0
        if chosen.schedule == "step":
            warm *= chosen.gamma**epoch
        elif chosen.schedule == "cosine" and step >= chosen.warmup_steps:
            turn = math.pi * (step - chosen.warmup_steps) / (total_steps - chosen.warmup_steps)
            warm = chosen.gamma + (1 - chosen.gamma) * (1 + math.cos(turn)) / 2
        for group in optimizer.param_groups:
            group["lr"] = chosen.lr * warm
        optimizer.step()
        losses.append(loss)
    return losses, norms


CASES = {
    "tutorial": "optimizer.name=sgd optimizer.lr=0.5 optimizer.clip_norm=0.5 optimizer.schedule=step "
    "optimizer.gamma=0.95 data.batching=columns model.norm=post model.activation=relu model.tie_embeddings=false",
    "momentum, accumulation, tiny buckets": "optimizer.name=sgd optimizer.momentum=0.9 optimizer.lr=0.1 "
    "optimizer.schedule=step optimizer.gamma=0.5 optimizer.warmup_steps=3 data.batching=columns "
    "training.accumulation=3 parallel.micro_batches=3 communication.bucket_mb=1e-6",
    "adamw, windows": "optimizer.name=adamw optimizer.schedule=cosine optimizer.warmup_steps=4 "
    "optimizer.clip_norm=none parallel.micro_batches=3 communication.bucket_mb=0.001 optimizer.weight_decay=0.3",
    "adamw, windows, accumulation, small clip": "optimizer.name=adamw optimizer.schedule=cosine "
    "training.accumulation=4 parallel.micro_batches=2 optimizer.clip_norm=0.01 model.position=learned",
    "adam, columns": "optimizer.name=adam optimizer.schedule=constant data.batching=columns "
    "training.accumulation=2 model.tie_embeddings=false optimizer.weight_decay=0.1 communication.overlap=false",
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_a_plain_script(case: str) -> None:
    config = settings(
        "training.precision=fp64", "model.position=sinusoidal", "training.max_steps=25", *CASES[case].split()
    )
    job = trainer(config)
    plain = PlainTransformer(VOCABULARY, config.model).double().load(weights(job))
    steps = column_steps(config) if config.data.batching == "columns" else window_steps(config, job)
    losses, norms = plain_training(config, plain, steps)
    results = [job.step(plan) for plan in job.steps()]
    assert len(results) == 25 and results[-1].epoch > 0
    assert [result.totals.loss for result in results] == pytest.approx(losses, rel=1e-9)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-8)
    for name, weight in plain.by_our_names().items():
        own = job.task.model.get_parameter(name)
        torch.testing.assert_close(own, weight, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("batching", ["windows", "columns"])
def test_a_rank_of_two_that_do_the_same_trains_as_if_alone_with_its_samples(batching: str) -> None:
    """The sums over the ranks, and the division by all their tokens, are right together."""
    words = ["training.precision=fp64", f"data.batching={batching}", "training.accumulation=2", "training.max_steps=5"]
    config = settings(*words, "optimizer.lr_scaling=none", "optimizer.schedule=constant")
    world = FakeWorld(size=2)
    job = trainer(config, world)
    alone = trainer(config)
    alone.task.sampler = job.task.sampler  # the same samples as rank 0 of two
    both, one = ([trained.step(plan) for plan in trained.steps()] for trained in (job, alone))
    assert [result.totals.loss for result in both] == pytest.approx([result.totals.loss for result in one], rel=1e-12)
    assert [result.grad_norm for result in both] == pytest.approx([result.grad_norm for result in one], rel=1e-10)
    assert [result.totals.targets for result in both] == [2 * result.totals.targets for result in one]
    assert job.state.samples == 2 * alone.state.samples
    for name, weight in weights(alone).items():
        torch.testing.assert_close(weights(job)[name], weight, rtol=1e-10, atol=1e-12)


def test_the_sums_of_a_step_travel_with_its_last_gradients() -> None:
    world = FakeWorld(size=2)
    words = ["communication.bucket_mb=1e-6", "training.accumulation=2", "communication.embedding_rows=always"]
    job = trainer(settings(*words), world)
    world.events.clear()
    job.step(next(job.steps()))
    sends = [event for event in world.events if event.startswith("send")]
    # The rows of the tied embedding are sent in two: their tokens and their values.
    assert sends[-1] == "send step.sums" and len(sends) == 1 + len(job.engine.buffers) + 2
    assert sorted(event.replace("wait", "send") for event in world.events if event.startswith("wait")) == sorted(sends)
    first_wait = next(index for index, event in enumerate(world.events) if event.startswith("wait"))
    assert first_wait == len(sends)


def test_costs_travel_with_the_sums_of_a_step() -> None:
    world = FakeWorld(size=2)
    job = trainer(settings(), world)
    plans = job.steps()
    world.events.clear()
    found = job.step(next(plans), Wishes(save=True), [0.5, 3e15])
    assert found.totals.costs == [1.0, 6e15] and found.totals.wishes == Wishes(save=True)
    assert [event for event in world.events if "step." in event] == ["send step.costs", "wait step.costs"]
    assert job.step(next(plans)).totals.costs == []


def test_local_steps_send_nothing_until_they_report() -> None:
    world = FakeWorld(size=2)
    job = trainer(settings("communication.local_steps=40", "optimizer.lr_scaling=linear"), world)
    plans = job.steps()
    world.events.clear()
    found = [job.step(next(plans), Wishes(stop=True), report=step == 2) for step in range(3)]
    assert world.events == ["send step.sums", "wait step.sums"]
    assert [result.totals.targets for result in found] == [0, 0, 3 * 2 * 4 * 5]  # 2 replicas with 4 windows of 5
    assert [result.totals.wishes.stop for result in found] == [False, False, True]
    assert (job.state.samples, found[0].learning_rate) == (3 * 2 * 4, job.config.optimizer.lr)
    world.events.clear()
    job.evaluate("valid")
    job.synchronize()
    averaged = ["average.weights.0", "average.exp_avg.0", "average.exp_avg_sq.0", "average.scales"]
    assert [event for event in world.events if "average" in event and "send" in event] == [
        f"send {name}" for name in averaged
    ]


class OtherRanks(FakeWorld):
    """The other ranks have ten targets with loss 2 each, and add no gradients."""

    def all_reduce_async_(self, tensor: Tensor, name: str, operation: str = "sum") -> Callable[[], Tensor]:
        super().all_reduce_async_(tensor, name, operation)

        def wait() -> Tensor:
            self.events.append(f"wait {name}")
            if name == "step.sums":
                tensor[:3] += torch.tensor([20.0, 10.0, 2.0], dtype=tensor.dtype)
            return tensor

        return wait


def test_a_replica_without_samples_takes_part_in_the_step() -> None:
    calls = []
    for replica, samples in [(8, 0), (0, 1)]:  # 41 windows: the second step has 5 for 9 replicas
        world = OtherRanks(replica, 9)
        job = trainer(settings("training.epochs=1", "training.max_steps=none"), world, replica=replica)
        plans = list(job.task.sampler.epoch())
        assert sum(map(len, plans[-1].accumulation)) == samples and len(plans) == 2
        job.step(plans[0])
        world.events.clear()
        job.step(plans[1])
        assert (job.state.step, job.state.epoch) == (2, 1)
        calls.append(sorted(world.events))
        if not samples:
            assert not any(tensor.any() for name, tensor in world.sent.items() if name.startswith("bucket"))
    assert calls[0] == calls[1]


def test_rounds_are_cut_into_at_most_micro_batches_pieces() -> None:
    job = trainer(settings("training.batch_size=7", "parallel.micro_batches=3", "training.accumulation=2"))
    sizes: list[int] = []
    job.task.model.embedding.register_forward_hook(lambda _, inputs, output: sizes.append(len(inputs[0])))
    job.step(next(job.steps()))
    assert sizes == [3, 3, 1, 3, 3, 1]


def test_evaluation_is_the_mean_of_every_token_without_dropout() -> None:
    config = settings("training.precision=fp64", "model.position=sinusoidal", "model.dropout=0.5")
    job = trainer(config)
    plain = PlainTransformer(VOCABULARY, config.model).double().load(weights(job)).eval()
    text = torch.from_numpy(SPLITS["valid"].astype("int64"))
    total = 0.0
    for start in range(0, len(text) - 1, 5):
        piece = text[start : start + 6]
        total += F.cross_entropy(plain(piece[None, :-1])[0], piece[1:], reduction="sum").item()
    result = job.evaluate("valid")
    assert result.num_targets == len(text) - 1
    assert result.metrics["loss"] == pytest.approx(total / (len(text) - 1), rel=1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_every_precision_trains_down(precision: str) -> None:
    words = ["training.max_steps=60", "optimizer.lr=0.02", "optimizer.schedule=constant", "training.batch_size=8"]
    job = trainer(settings(f"training.precision={precision}", *words))
    losses = run(job)
    assert all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=1.0)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert job.state.updates == 60


@pytest.mark.parametrize(("precision", "bits"), [("bf16", 9), ("fp16", 12)])
def test_half_precision_gradients_are_those_of_float32_but_for_rounding(precision: str, bits: int) -> None:
    """A product's rounding is 2^-bits of a value; with less than half of it the format was not in use."""
    found = {}
    for name in ("fp32", precision):
        job = trainer(settings(f"training.precision={name}"))
        job.step(next(job.steps()))
        assert all(buffer.gradients.dtype == torch.float32 for buffer in job.engine.buffers)
        found[name] = torch.cat([buffer.gradients for buffer in job.engine.buffers])
    exact = found["fp32"]
    difference = float((found[precision] - exact).norm() / exact.norm())
    assert 2**-bits / 2 < difference < 4 * 2**-bits


def test_an_overflow_leaves_the_step_out_and_halves_the_scale() -> None:
    job = trainer(settings("training.precision=fp16", "optimizer.schedule=constant"))
    plans = job.steps()
    job.loss_scaler.scale = 2.0**60
    before = weights(job)
    result = job.step(next(plans))
    assert not math.isfinite(result.grad_norm) and math.isfinite(result.totals.loss)
    assert job.loss_scaler.scale == 2.0**59
    assert (job.state.step, job.state.updates) == (1, 0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(job).items())
    assert not any(flat.any() for state in job.engine.optimizer_state() for flat in state.values())
    # Afterwards it goes on as if that step had not been.
    job.loss_scaler.scale = 2.0**10
    assert math.isfinite(job.step(next(plans)).grad_norm)
    assert (job.state.step, job.state.updates) == (2, 1)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(job).items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_loss_that_is_no_number_is_told_with_its_step_and_changes_nothing(precision: str) -> None:
    job = trainer(settings(f"training.precision={precision}"))
    run(job, 2)
    job.task.model.head.weight.data[0, 0] = math.nan
    before = weights(job)
    with pytest.raises(Diverged) as caught:
        job.step(next(job.steps()))
    message = str(caught.value)
    assert message.startswith("step 3: the loss is nan") and "optimizer.lr" in message and "\n" not in message
    for name, weight in weights(job).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0, equal_nan=True)


def test_float16_that_overflows_at_any_scale_has_diverged() -> None:
    job = trainer(settings("training.precision=fp16", "training.max_steps=100"))
    job.engine.grad_norm = lambda: torch.tensor(math.inf)
    with pytest.raises(Diverged, match="^step 17: "):
        run(job)
    assert job.loss_scaler.scale == 1.0


@pytest.mark.parametrize("ahead", [False, True])
def test_float16_without_a_loss_is_not_a_matter_of_the_scale(ahead: bool) -> None:
    job = trainer(settings("training.precision=fp16", "training.max_steps=100"))
    job.updates_ahead = ahead
    plans, sound = job.steps(), job.task.model.head.weight.data[0, 0].clone()
    for value in (math.nan, math.nan, sound, math.nan, math.nan):  # as long as it is a batch or two
        job.task.model.head.weight.data[0, 0] = value
        job.step(next(plans))
    assert (job.state.updates, job.steps_without_loss) == (1, 2)
    with pytest.raises(Diverged, match="^step 6: the loss is nan"):
        job.step(next(plans))


def test_metrics_of_a_task_may_be_any_kind_of_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of one's own takes them from NumPy or torch."""
    job = trainer(settings())
    made = {"loss": torch.tensor(1.5), "rmse": np.float32(0.5), "hits": 3}
    monkeypatch.setattr(job.task, "metrics", lambda sums, count: made)
    found = job.evaluate("valid").metrics
    assert found == {"loss": 1.5, "rmse": 0.5, "hits": 3.0} and set(map(type, found.values())) == {float}


@pytest.mark.parametrize("batching", ["windows", "columns"])
def test_the_number_of_steps_is_known_before_and_kept(batching: str) -> None:
    words = [f"data.batching={batching}", "training.epochs=3", "training.max_steps=none", "training.accumulation=2"]
    job = trainer(settings(*words))
    # 213 tokens: 41 windows of 5, 8 a step; or 4 columns of 53 rows, 11 stretches, 2 a step.
    per_epoch = {"windows": 6, "columns": 6}[batching]
    assert job.total_steps == 3 * per_epoch == len(run(job))
    assert (job.state.epoch, job.state.remaining) == (3, None)
    assert job.state.samples == 3 * {"windows": 41, "columns": 44}[batching]
    # In the middle of the second epoch, and with an end before the third.
    again = trainer(settings(*words), position=TrainState(step=8, epoch=1, remaining=[(16, 41)]))
    if batching == "windows":
        assert again.total_steps == 8 + 4 + 6
    assert trainer(settings(*words, "training.max_steps=9"), position=TrainState(step=8, epoch=1)).total_steps == 9
    assert run(trainer(settings(*words), position=TrainState(step=18, epoch=3))) == []


def test_wishes_of_a_rank_reach_the_result() -> None:
    job = trainer(settings())
    plans = job.steps()
    for wishes in (Wishes(), Wishes(stop=True), Wishes(save=True), Wishes(compare=True)):
        assert job.step(next(plans), wishes).totals.wishes == wishes


def test_dropout_depends_on_the_place_in_the_job_alone() -> None:
    config = settings("model.dropout=0.3", "training.max_steps=6")
    first = trainer(config)
    losses = run(first)
    second = trainer(config)
    second_losses = []
    for plan in second.steps():
        torch.manual_seed(len(second_losses))  # whatever else draws random numbers meanwhile
        second_losses.append(second.step(plan).totals.loss)
    assert losses == second_losses
    assert all(torch.equal(weight, weights(second)[name]) for name, weight in weights(first).items())
    assert losses != run(trainer(settings("model.dropout=0.0", "training.max_steps=6")))


@pytest.mark.parametrize("batching", ["windows", "columns"])
def test_dropout_of_a_fixed_global_batch_is_the_same_over_any_number_of_replicas(batching: str) -> None:
    def drawn(size: int) -> list[Tensor]:
        """What the first step drops, in the order of its samples."""
        masks: list[Tensor] = []
        words = ["training.batch_size=2", "training.global_batch_size=8", f"data.batching={batching}"]
        for replica in range(size):
            config = settings("model.dropout=0.3", "parallel.micro_batches=2", *words)
            job = trainer(config, FakeWorld(replica, size), replica=replica)
            job.task.model.embedding.dropout.register_forward_hook(lambda _, inputs, output: masks.append(output == 0))
            job.step(next(job.steps()))
        return masks

    alone = drawn(1)
    assert len(alone) == 8 and all(not torch.equal(a, b) for i, a in enumerate(alone) for b in alone[:i])
    for size in (2, 4):
        assert all(map(torch.equal, drawn(size), alone))


def test_dropout_differs_between_steps_micro_batches_and_replicas() -> None:
    drawn = []
    for replica in (0, 1):
        job = trainer(settings("model.dropout=0.3", "parallel.micro_batches=2"), FakeWorld(replica, 2), replica=replica)
        job.task.model.embedding.dropout.register_forward_hook(lambda _, inputs, output: drawn.append(output == 0))
        plans = job.steps()
        job.step(next(plans))
        job.step(next(plans))
    assert len(drawn) == 8
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_between_hosts_a_small_model_has_several_buckets_and_on_one_host_one() -> None:
    words = ["model.d_model=256", "model.d_feedforward=1024", "model.num_heads=4", "communication.embedding_rows=never"]
    alone, spread = FakeWorld(size=2), FakeWorld(size=2)
    spread.hosts = ["one", "two"]
    few, several = (trainer(settings(*words), world).engine.buffers for world in (alone, spread))
    assert len(few) == 1 and len(several) > 4
    names = [{slot.name for slot in buffer.slots} for buffer in several]
    assert {"embedding.embedding.weight"} in names  # complete last: nothing else waits for it


def test_a_step_and_an_evaluation_compute_on_what_was_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a copy that the task makes of it, from which a GPU could not read while it computes."""
    pinned: list[MicroBatch] = []
    used: list[MicroBatch] = []

    def pin(_: Trainer, batch: MicroBatch) -> MicroBatch:
        pinned.append(batch._replace(inputs=tuple(tensor.clone() for tensor in batch.inputs)))
        return pinned[-1]

    monkeypatch.setattr(Trainer, "_pinned", pin)
    job = trainer(settings("parallel.micro_batches=2"))
    pipeline = job.engine.pipeline
    forward_backward, evaluate = pipeline.forward_backward, pipeline.evaluate

    def step(accumulation: Sequence[Sequence[MicroBatch]], *more: Any) -> None:
        used.extend(batch for batches in accumulation for batch in batches)
        forward_backward(accumulation, *more)

    def losses(batches: Sequence[MicroBatch]) -> Any:
        used.extend(batches)
        return evaluate(batches)

    monkeypatch.setattr(pipeline, "forward_backward", step)
    monkeypatch.setattr(pipeline, "evaluate", losses)
    run(job, 1)
    job.evaluate("valid")
    job.close()
    of_pinned = {id(tensor) for batch in pinned for tensor in batch.inputs}
    assert len(used) > 2
    assert all(id(tensor) in of_pinned for batch in used for tensor in batch.inputs)


def test_batches_for_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    job = trainer(settings())
    batch = job.task.micro_batch(job.task.batch(0, range(2)))
    assert job._pinned(batch) is batch and not pinned
    job.mesh = replace(job.mesh, devices=(torch.device("cuda", 0),))
    found = job._pinned(batch)
    assert [id(tensor) for tensor in (*found.inputs, *found.targets)] == [id(tensor) for tensor in pinned]
    job.close()
