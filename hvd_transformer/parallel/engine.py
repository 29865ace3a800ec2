"""One rank's model, wired for data, pipeline and tensor parallel training."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import Config, OptimizerConfig
from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.gradients.optimizer import FlatOptimizer
from hvd_transformer.gradients.param_all_gather import ParamAllGather
from hvd_transformer.gradients.sync import GradSync
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Stage
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding, WeightGradLayer
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.partition import _counts
from hvd_transformer.tasks.task import Task


def make_stages(config: Config, task: Task, layout: ParallelMesh, world: World) -> list[Stage]:
    """The stages, moved to their devices; the same cut on all ranks. Collective. Raises `UserError` on all ranks."""
    layers = task.layers
    own = agree(world, lambda: _counts(config, task, layout, world.rank == 0))
    counts = world.all_gather_objects(own)[0]
    stages, start = [], 0
    for count, device in zip(counts, layout.devices, strict=True):
        stages.append(Stage(layers[start : start + count], device))
        start += count
        for layer in stages[-1].layers:
            layer.module.to(device)
    return stages


class StageWeights:
    """`indices` are its buckets' numbers among the job's, from `first` on; `places` the parameters' in the model.

    `group` are the ranks with the same weights, which update a shard each where the buckets are so cut.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        buckets: Sequence[GradBuffer],
        group: Group,
        first: int,
        places: Mapping[str, int],
    ) -> None:
        self.buckets, self.indices = buckets, range(first, first + len(buckets))
        self.gathering: ParamAllGather | None = None
        if any(bucket.shard.count > 1 for bucket in buckets):
            self.gathering = ParamAllGather(buckets, [f"shards.{index}" for index in self.indices], group)
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


def take_products(model: nn.Module, stages: Iterable[tuple[Stage, WeightGradStore]], reducer: GradSync) -> None:
    """Of the stages' layers, lookups' apart. Weights that modules share, or that are not trained, are left to
    autograd."""
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    users = Counter(
        id(weight)
        for module in model.modules()
        if not isinstance(module, VocabParallelEmbedding)  # which gives rows
        for weight in module.parameters(recurse=False)
    )
    for module, later in (
        (module, later) for stage, later in stages for layer in stage.layers for module in layer.module.modules()
    ):
        own = list(module.parameters(recurse=False))
        if isinstance(module, WeightGradLayer) and all(
            id(weight) in names and users[id(weight)] == 1 for weight in own
        ):
            bias = None if module.bias is None else names[id(module.bias)]
            module.take_product = reducer.take_product(names[id(module.weight)], bias, later)
