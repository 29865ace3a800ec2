"""After an update every weight is there when a layer uses it, and not much is on its way at once."""

import torch
from fake_world import FakeWorld
from torch import Tensor, nn

from hvd_transformer.gradients.buffers import GradBuffer, ZeroShard, make_grad_buffers
from hvd_transformer.gradients.param_all_gather import ParamAllGather, make_param_all_gathers
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.parallel.model_stage import ModelStage
from hvd_transformer.parallel.pipeline import Pipeline

SIZE = 2


def job(events: list[str], **options: float) -> tuple[list[GradBuffer], ModelStage, ParamAllGather]:
    """Three layers in a bucket each; the last uses the first's weight, too."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    layers[2].tied = layers[0].weight  # type: ignore[assignment]
    world = FakeWorld(size=SIZE)
    world.events = events
    parameters = {f"{number}": layer.weight for number, layer in enumerate(layers)}
    buckets = make_grad_buffers(parameters, set(), 1, shard=ZeroShard(0, SIZE))

    def layer(number: int) -> Layer:
        def run(values: Tensor) -> Tensor:
            events.append(f"layer {number}")
            return layers[number](values)

        return Layer(f"{number}", layers[number], run)

    stage = ModelStage([layer(number) for number in range(3)], torch.device("cpu"))
    (gathering,), stage.waits = make_param_all_gathers(stage.layers, [buckets], world, **options)
    return buckets, stage, gathering


def forward(stage: ModelStage) -> None:
    Pipeline([stage]).evaluate([MicroBatch((torch.ones(1, 4),), ())])


def test_layers_wait_for_the_weights_that_they_use_and_for_no_more() -> None:
    events: list[str] = []
    _, stage, gathering = job(events)
    forward(stage)
    assert events == ["layer 0", "layer 1", "layer 2"]  # nothing is on its way
    events.clear()
    gathering.start()
    assert events == ["send shards.2", "send shards.1", "send shards.0"]  # in the order of need, not of the buckets
    for _ in range(2):
        forward(stage)
    assert events[3:] == [
        "wait shards.2",
        "layer 0",
        "wait shards.1",
        "layer 1",
        "wait shards.0",
        "layer 2",
        "layer 0",
        "layer 1",
        "layer 2",
    ]


def test_the_later_ones_begin_when_the_first_arrive() -> None:
    events: list[str] = []
    _, stage, gathering = job(events, bytes_in_flight=260)  # two buckets of 128 bytes
    gathering.start()
    assert events == ["send shards.2", "send shards.1"]
    forward(stage)
    assert events[2:] == [
        "wait shards.2",
        "send shards.0",
        "layer 0",
        "wait shards.1",
        "layer 1",
        "wait shards.0",
        "layer 2",
    ]
    events.clear()
    gathering.start()
    gathering.wait_all()
    assert events == [
        "send shards.2",
        "send shards.1",
        "wait shards.2",
        "send shards.0",
        "wait shards.1",
        "wait shards.0",
    ]
    gathering.wait_all()
    assert len(events) == 6


def test_what_arrives_is_every_ranks_shard() -> None:
    buckets, _, gathering = job([])
    with torch.no_grad():
        for bucket in buckets:
            bucket.parameters.fill_(7)
            bucket.own_parameters.copy_(torch.arange(16.0))
    gathering.start()
    gathering.wait_all()
    for bucket in buckets:  # the other rank of this world holds the same
        assert torch.equal(bucket.parameters, torch.arange(16.0).repeat(2))
