"""Pipeline stages with their gradient buffers and optimizers: which buffer each parameter is in, and of what size."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.config.schema import Config, OptimizerConfig
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.buffers import GradBuffer, make_grad_buffers
from hvd_transformer.gradients.muon import hidden_matrices, orthogonalise_cost
from hvd_transformer.gradients.optimizer import FlatOptimizer, names_without_decay
from hvd_transformer.gradients.param_all_gather import ParamAllGather
from hvd_transformer.gradients.shared_matrices import SharedMatrices
from hvd_transformer.gradients.transfer_sizes import LEAST_SHARE
from hvd_transformer.gradients.update_factor import UpdateFactor
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding, WeightGradLayer
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.pipeline import Stage
from hvd_transformer.parallel.tensor_parallel import Shapes, Splits

# Where buffers travel beside backward: their number per stage, unless that made them too small.
LEAST_BUCKETS = 4


class ModelStage(Stage):
    """A pipeline stage with its gradient buffers and optimizer, so that stages send and update side by side."""

    def __init__(self, layers: Sequence[Layer], device: torch.device) -> None:
        super().__init__(layers, device)
        for layer in layers:
            layer.module.to(device)
        self.all_gather: ParamAllGather | None = None  # ZeRO

    def add_buffers(
        self, config: OptimizerConfig, buffers: Sequence[GradBuffer], matrices: SharedMatrices | None
    ) -> None:
        self.buffers = buffers
        self.optimizer = FlatOptimizer(config, buffers, matrices)

    def norms(self) -> dict[str, Tensor]:
        """The norm of each parameter's gradient in this rank's shard, by name."""
        return {name: norm for buffer in self.buffers for name, norm in buffer.norms().items()}

    def update(self, factor: float | UpdateFactor, rate: float) -> None:
        """One optimizer step with the gradients × `factor`; starts the all-gather of sharded parameters."""
        self.optimizer.step(rate, factor)
        if self.all_gather is not None:
            self.all_gather.start()

    def exchange_weights(self) -> None:
        """Swap the raw and the averaged weights; starts the all-gather of sharded parameters."""
        if self.optimizer.average is not None:
            self.optimizer.average.exchange()
            if self.all_gather is not None:
                self.all_gather.start()


def check_shared_weights(stages: Sequence[ModelStage]) -> None:
    """Raise `UserError` if a weight gets gradients from several stages: they would come at any time, and from threads
    side by side. A tied embedding's lookups are another matter: the last stage adds their rows at the end.
    """
    last = {id(weight): stage for stage in stages for layer in stage.layers for weight in layer.module.parameters()}
    for stage in stages:
        for layer in stage.layers:
            for module in layer.module.modules():
                trained = (weight for weight in module.parameters(recurse=False) if weight.requires_grad)
                shared = any(last[id(weight)] is not stage for weight in trained)
                if shared and not isinstance(module, VocabParallelEmbedding):
                    raise UserError(
                        f"parallel.pipeline={len(stages)}: layer {layer.name} shares a weight with a later stage; "
                        "choose parallel.partition so that such layers are in one stage"
                    )


def check_layers(stages: Sequence[ModelStage], model: nn.Module, trained: Collection[str]) -> None:
    """Raise `UserError` if a weight that is trained belongs to no layer, as may be in a task of one's own."""
    held = {id(weight) for stage in stages for layer in stage.layers for weight in layer.module.parameters()}
    for name, weight in model.named_parameters():
        if name in trained and id(weight) not in held:
            raise UserError(
                f"the task's `layers`: no Layer has the parameter {name}; add it to the module of the Layer that uses "
                "it, or name it in `frozen`"
            )


def add_buffers(
    stages: Sequence[ModelStage],
    model: nn.Module,
    config: Config,
    mesh: ParallelMesh,
    *,
    num_hosts: int,
    splits: Splits,
    shapes: Shapes,
    gathers: Mapping[str, bool],
    most: int,
) -> None:
    """Give each stage buffers of its own parameters, so that it sends and updates without the others. They have at
    most `most` bytes.

    `splits` and `shapes` as in `Engine`. A tied parameter belongs to the last stage that has it: the output layer's,
    where its dense gradient comes from. `gathers` says of looked-up parameters whether their rows are gathered.

    Buffers can travel while backward goes on. On one host whose cores all compute that gains nothing, and each message
    costs their time; elsewhere a stage has several, and the last embedding keeps no other one waiting.
    """
    stage_of = {id(weight): stage for stage in stages for layer in stage.layers for weight in layer.module.parameters()}
    parameters: dict[ModelStage, dict[str, nn.Parameter]] = {stage: {} for stage in stages}
    for name, weight in model.named_parameters():
        if name in shapes:
            parameters[stage_of[id(weight)]][name] = weight
    no_decay = names_without_decay(model)
    alone = {name for name, rows in gathers.items() if rows}
    travels = num_hosts > 1 or mesh.device.type == "cuda"
    hidden = _muon_matrices(model) if config.optimizer.name == "muon" else set[str]()
    # What all ranks of a tensor group hold must be added up and rounded alike on all of them, whatever else they hold;
    # the sum of two replicas is the same in any order.
    uneven = any(shapes[name][split.dim] // split.parts % mesh.tp for name, split in splits.items() if name in shapes)
    apart = mesh.tp > 1 and ((uneven and mesh.dp > 2) or config.communication.compression != "none")
    unsplit = shapes.keys() - splits.keys() if apart else set[str]()
    least = LEAST_SHARE * mesh.zero_shard.count
    for number, (stage, own) in enumerate(parameters.items()):
        own_bytes = sum(
            math.prod(shapes[name]) * weight.itemsize // (mesh.tp if name in splits else 1)
            for name, weight in own.items()
        )
        part = max(least, own_bytes // LEAST_BUCKETS)
        size, last = (min(most, part), gathers.keys() - alone) if travels else (most, set())
        buffers = make_grad_buffers(own, no_decay, size, alone, mesh.zero_shard, apart=(hidden, last, unsplit))
        matrices = None
        if hidden:
            matrices = SharedMatrices(
                [buffer for buffer in buffers if buffer.slots[0].name in hidden],
                splits=splits,
                shapes=shapes,
                # In local steps each replica makes its own update.
                replicas=mesh.dp_group if config.communication.local_steps == 1 else mesh.dp_group.alone(),
                tensor_group=mesh.tp_group,
                cost=orthogonalise_cost,
                name=f"muon.{number}",
            )
        stage.add_buffers(config.optimizer, buffers, matrices)


def _muon_matrices(model: nn.Module) -> set[str]:
    """The names of the parameters that Muon updates."""
    hidden = {id(weight) for weight in hidden_matrices([model])}
    return {name for name, weight in model.named_parameters() if id(weight) in hidden}


def add_shadows(model: nn.Module, buffers: Iterable[GradBuffer], dtype: torch.dtype) -> None:
    """Let the linear layers multiply by weights that are in the number format of autocast already."""
    places = {id(slot.parameter): (buffer, slot) for buffer in buffers for slot in buffer.slots}
    for module in model.modules():
        if isinstance(module, WeightGradLayer) and id(module.weight) in places:
            buffer, slot = places[id(module.weight)]
            module.shadow = slot.view(buffer.add_shadow(dtype))
