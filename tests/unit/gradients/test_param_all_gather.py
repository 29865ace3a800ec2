"""After an update every weight is there when a layer uses it, and not much is on its way at once."""

import pytest
import torch
from fake_world import FakeWorld
from torch import Tensor, nn

from hvd_transformer.gradients.buffers import ZeroShard, make_grad_buffers
from hvd_transformer.gradients.param_all_gather import ParamAllGather, plan_param_waits
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.parallel.engine import ModelStage

SIZE = 2


def job(events: list[str]) -> tuple[FakeWorld, list[ModelStage], ParamAllGather]:
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

    gathering = ParamAllGather(buckets, [bucket.slots[0].name for bucket in buckets], world)
    stage = ModelStage([layer(number) for number in range(3)], torch.device("cpu"))
    stage.waits = plan_param_waits(stage.layers, [gathering])
    return world, [stage], gathering


def forward(stages: list[ModelStage]) -> Tensor:
    values = torch.ones(1, 4)
    for layer in stages[0].layers:
        stages[0].wait_params(layer)
        values = layer.run(values)
    return values


def test_layers_wait_for_the_weights_that_they_use_and_for_no_more() -> None:
    events: list[str] = []
    _, stages, gathering = job(events)
    forward(stages)
    assert events == ["layer 0", "layer 1", "layer 2"]  # nothing is on its way
    events.clear()
    gathering.start()
    assert events == ["send 0", "send 1", "send 2"]  # in the order of need, not of the buckets
    for _ in range(2):
        forward(stages)
    assert events[3:] == [
        "wait 0",
        "layer 0",
        "wait 1",
        "layer 1",
        "wait 2",
        "layer 2",
        "layer 0",
        "layer 1",
        "layer 2",
    ]


def test_the_later_ones_begin_when_the_first_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_transformer.gradients.param_all_gather.MAX_IN_FLIGHT", 260)  # two buckets of 128 bytes
    events: list[str] = []
    _, stages, gathering = job(events)
    gathering.start()
    assert events == ["send 0", "send 1"]
    forward(stages)
    assert events[2:] == ["wait 0", "send 2", "layer 0", "wait 1", "layer 1", "wait 2", "layer 2"]
    events.clear()
    gathering.start()
    gathering.wait_all()
    assert events == ["send 0", "send 1", "wait 0", "send 2", "wait 1", "wait 2"]
    gathering.wait_all()
    assert len(events) == 6


def test_what_arrives_is_every_ranks_shard() -> None:
    _, _, gathering = job([])
    with torch.no_grad():
        for bucket in gathering.buffers:
            bucket.parameters.fill_(7)
            bucket.own_parameters.copy_(torch.arange(16.0))
    gathering.start()
    gathering.wait_all()
    for bucket in gathering.buffers:  # the other rank of this world holds the same
        assert torch.equal(bucket.parameters, torch.arange(16.0).repeat(2))
