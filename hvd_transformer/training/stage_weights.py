"""The weights of one pipeline stage: their buckets, gradients and optimizer, so that stages update side by side."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.config.schema import OptimizerConfig
from hvd_transformer.parallel.flat import Bucket
from hvd_transformer.parallel.gathering import Gathering
from hvd_transformer.parallel.pipeline import Stage
from hvd_transformer.training.optimizer import FlatOptimizer


class StageWeights:
    """`indices` are its buckets' numbers among the job's, from `first` on; `places` the parameters' in the model.

    `group` are the ranks with the same weights, which update a shard each where the buckets are so cut.
    """

    def __init__(
        self, config: OptimizerConfig, buckets: Sequence[Bucket], group: Group, first: int, places: Mapping[str, int]
    ) -> None:
        self.buckets, self.indices = buckets, range(first, first + len(buckets))
        self.gathering: Gathering | None = None
        if any(bucket.shard.count > 1 for bucket in buckets):
            self.gathering = Gathering(buckets, [f"shards.{index}" for index in self.indices], group)
        self.optimizer = FlatOptimizer(config, buckets)
        self._gradients = [
            (places[slot.name], bucket.own_gradients[own])
            for bucket in buckets
            for slot in bucket.slots
            if (own := bucket.own_part(slot.start, slot.stop)) is not None
        ]

    def norms(self) -> list[tuple[int, Tensor]]:
        """Each parameter's place in the model and the norm of its gradient, of what is in this rank's shard."""
        return [(place, torch.linalg.vector_norm(gradient)) for place, gradient in self._gradients]

    def update(self, factor: float, rate: float) -> None:
        """One step of the optimizer with the gradients × `factor`; the ranks begin to give each other their shards."""
        if factor != 1.0:
            for bucket in self.buckets:
                bucket.own_gradients.mul_(factor)
        self.optimizer.step(rate)
        if self.gathering is not None:
            self.gathering.start()


def stage_parameters(model: nn.Module, stages: Sequence[Stage]) -> list[dict[str, nn.Parameter]]:
    """Each stage's parameters by name, in the model's order. A tied one belongs to the last stage that has it: the
    output layer's, where its dense gradient comes from."""
    stage_of = {
        id(weight): number
        for number, stage in enumerate(stages)
        for layer in stage.layers
        for weight in layer.module.parameters()
    }
    result: list[dict[str, nn.Parameter]] = [{} for _ in stages]
    for name, weight in model.named_parameters():
        result[stage_of[id(weight)]][name] = weight
    return result
