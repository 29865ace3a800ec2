"""A job whose model is cut into stages trains bit for bit like one that is not, whatever the cut and the schedule."""

import json
from functools import cache

import pytest
import torch
from fake_world import FakeWorld
from grad_sinks import Sink, parameter_grads
from small_job import run, settings, trainer, weights

from hvd_transformer.config import Config
from hvd_transformer.data.batches import Batch
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.buffers import ZeroShard
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.parallel.model_stage import ModelStage, check_layers, check_shared_weights
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS = 4  # with embedding and output layer: 6 layers
SCHEDULES = ["gpipe", "1f1b", "zero_bubble"]
RECOMPUTE = ["never", "always", "except_last"]


def config(*words: str) -> Config:
    small = ["model.dropout=0.3", "training.max_steps=3", "optimizer.clip_norm=0.1"]  # each step is clipped
    return settings(f"model.num_layers={NUM_BLOCKS}", *small, *words)


@cache
def unpiped(*words: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    job = trainer(config(*words))
    return run(job), weights(job)


def expect_same(job: Trainer, *words: str) -> None:
    """The same losses and weights as without a pipeline, with the same other settings."""
    losses, wanted = unpiped(*words)
    assert run(job) == losses
    found = weights(job)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())


def one_step(pieces: int, *words: str) -> Config:
    """Of `pieces` micro-batches, the last smaller than the others: two blocks, embedding and output layer."""
    return settings(
        "model.num_layers=2",
        "model.dropout=0.3",
        "optimizer.clip_norm=none",  # the gradients stay as backward made them
        f"training.batch_size={2 * pieces - 1}",
        f"parallel.micro_batches={pieces}",
        *words,
    )


@cache
def one_after_the_other(pieces: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the micro-batches and the gradients, without an engine. Lookups' gradients are added last; if they
    are more than the vocabulary, to each other first."""
    made = one_step(pieces)
    job = trainer(made)
    model, batch = job.task.model, first_batch(job)
    looked_up: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.embedding.embedding.embedding_grads = Sink(lambda *rows: looked_up.append(rows))
    for module in model.modules():
        if isinstance(module, WeightGradLayer):
            module.weight_grads = parameter_grads(module)
    losses = []
    for number, (inputs, targets) in enumerate(zip(*(tensor.split(2) for tensor in batch), strict=True)):
        with dropout_key(made.seed, 0, 0, number):  # epoch, first unit, piece
            loss = model.head.loss(model.hidden(inputs), targets)
        (loss / batch[1].numel()).backward()
        losses.append(loss.item())
    assert len(losses) == pieces
    weight = model.embedding.embedding.weight
    many = sum(tokens.numel() for tokens, _ in looked_up) > weight.size(0)
    added = torch.zeros_like(weight) if many else weight.grad
    for tokens, rows in looked_up:
        added.index_add_(0, tokens, rows)
    if many:
        weight.grad += added
    return losses, {name: weight.grad for name, weight in model.named_parameters()}


def first_batch(job: Trainer) -> Batch:
    (items,) = next(job.steps()).accumulation
    return job.task.batch(0, items)


# Each number of stages, schedule and recompute together with two of the others; the rest is slow.
CUTS = [
    pytest.param(stages, schedule, recompute, marks=[] if (stages + first + second) % 3 == 0 else pytest.mark.slow)
    for stages in (1, 2, 3, 4)
    for first, schedule in enumerate(SCHEDULES)
    for second, recompute in enumerate(RECOMPUTE)
]


@pytest.mark.parametrize(("stages", "schedule", "recompute"), CUTS)
def test_the_gradients_are_those_of_the_micro_batches_one_after_the_other(
    stages: int, schedule: str, recompute: str
) -> None:
    words = [f"parallel.pipeline={stages}", "parallel.partition=uniform"]
    words += [f"parallel.schedule={schedule}", f"parallel.recompute={recompute}"]
    for pieces in range(1, 17):
        losses, gradients = one_after_the_other(pieces)
        job = trainer(one_step(pieces, *words))
        result = job.step(next(job.steps()))
        assert result.totals.loss == sum(losses) / result.totals.targets
        found = {slot.name: slot.view(bucket.gradients) for bucket in job.engine.buffers for slot in bucket.slots}
        assert found.keys() == gradients.keys()
        assert [name for name in gradients if not torch.equal(found[name], gradients[name])] == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", ["always", "never"])
def test_embeddings_on_the_first_and_the_last_stage_stay_in_step(rows: str, tied: bool) -> None:
    same = (
        f"communication.embedding_rows={rows}",
        f"model.tie_embeddings={tied}",
        "training.batch_size=5",
        "parallel.micro_batches=3",
        "training.accumulation=2",
        "training.precision=fp64",
    )
    expect_same(trainer(config(*same, "parallel.pipeline=3", "parallel.partition=[1, 4, 1]")), *same)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_stage_without_weights_of_its_own_trains_with_a_sharded_optimizer(gradients: bool) -> None:
    """The tied embedding's weight belongs to the last stage, and rotary positions have none."""
    job, wanted = (
        trainer(config("model.position=rotary", *cut), FakeWorld(size=2), zero_shard=ZeroShard(0, 2, gradients))
        for cut in (["parallel.pipeline=2", "parallel.partition=[1, 5]"], [])
    )
    assert not job.engine.stages[0].buffers
    assert run(job) == run(wanted)
    assert job.evaluate("valid") == wanted.evaluate("valid")


def test_every_cut_gives_the_same_also_the_measured_one() -> None:
    same = ("parallel.micro_batches=2", "training.batch_size=4")
    for cut in ("[1, 5]", "[5, 1]", "[3, 3]", "auto"):
        expect_same(trainer(config(*same, "parallel.pipeline=2", f"parallel.partition={cut}")), *same)


def test_columns_are_measured_and_trained_too() -> None:
    same = ("data.batching=columns", "parallel.micro_batches=3", "training.batch_size=4")
    expect_same(trainer(config(*same, "parallel.pipeline=2")), *same)


def test_measuring_leaves_no_gradient_and_no_trace_in_the_weights() -> None:
    before = weights(trainer(config()))
    job = trainer(config("parallel.pipeline=3", "parallel.micro_batches=2"))
    assert sum(len(stage.layers) for stage in job.engine.stages) == NUM_BLOCKS + 2
    assert all(weight.grad is None for weight in job.task.model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in weights(job).items())


def test_evaluation_runs_through_the_stages() -> None:
    plain, piped = trainer(config()), trainer(config("parallel.pipeline=3", "parallel.partition=uniform"))
    assert plain.evaluate("valid") == piped.evaluate("valid")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.pipeline=7"], "parallel.pipeline=7: more stages than the model's 6 layers"),
        (["parallel.pipeline=2", "parallel.partition=[2, 3]"], "parallel.partition=[2, 3]: "),
        (["parallel.pipeline=2", "parallel.partition=[6, 0]"], "parallel.partition=[6, 0]: "),
        (["parallel.pipeline=2", "parallel.partition=[2, 2, 2]"], "parallel.partition=[2, 2, 2]: "),
        (["parallel.pipeline=2", "parallel.partition=no.such.module:cut"], "parallel.partition=no.such.module:cut: "),
        (["parallel.pipeline=2", "parallel.partition=even"], "parallel.partition=even: must be auto, uniform"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer(config(*words))
    assert str(caught.value).startswith(message)


def test_layers_that_share_a_weight_must_be_in_one_stage() -> None:
    shared, between = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    first, middle, last = (
        Layer(name, module, module) for name, module in zip("abc", (shared, between, shared), strict=True)
    )
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match="^parallel.pipeline=2: layer a shares a weight with a later stage; "):
        check_shared_weights([ModelStage([first, middle], cpu), ModelStage([last], cpu)])
    check_shared_weights([ModelStage([middle], cpu), ModelStage([first, last], cpu)])


def test_a_parameter_of_no_layer_is_named() -> None:
    """As of a module that a task of one's own forgot."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 3), "norm": torch.nn.LayerNorm(3)})
    stages = [ModelStage([Layer("used", model["used"], model["used"])], torch.device("cpu"))]
    with pytest.raises(UserError, match="^the task's `layers`: no Layer has the parameter norm.weight; add it to the "):
        check_layers(stages, model, dict(model.named_parameters()))
    check_layers(stages, model, ["used.weight", "used.bias"])  # the others are frozen


def test_the_timeline_shows_every_operation_in_its_lane() -> None:
    words = ["parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=3", "training.batch_size=6"]
    world = FakeWorld()
    job = trainer(config(*words, "communication.embedding_rows=never"), world)
    plans = job.steps()
    job.step(next(plans))  # not recorded
    job.engine.timeline.recording = True
    job.step(next(plans))
    job.close()
    events = json.loads(job.engine.timeline.trace())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    seen = [(lanes[event["tid"]], event["name"]) for event in spans]
    first, second = ([name for lane, name in seen if lane == f"stage {stage}"] for stage in (0, 1))
    back = [[f"backward {n}", f"weights {n}"] for n in range(3)]
    assert first == ["forward 0", "forward 1", "backward 0", "forward 2", "backward 1", "backward 2", "update"]
    assert second == [word for n in range(3) for word in (f"forward {n}", *back[n])] + ["update"]
    assert sum(lane.startswith("allreduce") for lane, _ in seen) == len(job.engine.buffers)
    assert {event["pid"] for event in events} == {world.rank}
    # A micro-batch reaches the second stage after the first, and its gradient comes back after that.
    ends = {(lanes[event["tid"]], event["name"]): event["ts"] + event["dur"] for event in spans}
    starts = {(lanes[event["tid"]], event["name"]): event["ts"] for event in spans}
    for number in range(3):
        assert starts["stage 1", f"forward {number}"] >= ends["stage 0", f"forward {number}"]
        assert starts["stage 0", f"backward {number}"] >= ends["stage 1", f"backward {number}"]
