"""Pipeline stages with their gradient buffers and optimizers: which buffer each parameter is in, and of what size."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.config.schema import Config, OptimizerConfig
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.buffers import GradBuffer, make_grad_buffers, place_together
from hvd_transformer.gradients.muon import hidden_matrices, orthogonalise_cost
from hvd_transformer.gradients.optimizer import FlatOptimizer, names_without_decay
from hvd_transformer.gradients.param_all_gather import ParamAllGather
from hvd_transformer.gradients.shared_matrices import SharedMatrices
from hvd_transformer.gradients.transfer_sizes import stage_bucket
from hvd_transformer.gradients.update_factor import UpdateFactor
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding, WeightGradLayer
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.pipeline import Stage
from hvd_transformer.parallel.tensor_parallel import Shapes, Splits


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
        """Run one optimizer step with the gradients × `factor`, and start the all-gather of sharded parameters."""
        self.optimizer.step(rate, factor)
        if self.all_gather is not None:
            self.all_gather.start()

    def exchange_weights(self) -> None:
        """Swap the raw and the averaged weights, and start the all-gather of sharded parameters."""
        if self.optimizer.average is not None:
            self.optimizer.average.exchange()
            if self.all_gather is not None:
                self.all_gather.start()


def check_shared_weights(stages: Sequence[ModelStage]) -> None:
    """Raise `UserError` if a weight gets gradients from several stages.

    Their threads would add to it at the same time, in any order. Lookups of a tied embedding are allowed: the last
    stage adds their rows at the end.
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


def check_layers(
    stages: Sequence[ModelStage],
    model: nn.Module,
    trained: Collection[str],
    *,
    recompute: str = "never",
    sharded: bool = False,
) -> None:
    """Raise `UserError` for what only a user-defined task can have: a trained weight of no layer, modules whose results
    differ from rank to rank or when they are recomputed, and, with a `sharded` optimizer, two layers of one name."""
    layers = [layer for stage in stages for layer in stage.layers]
    for name, count in Counter(layer.name for layer in layers if sharded).items():
        if count > 1:  # by its name a layer waits for the parameters that other ranks have updated
            raise UserError(
                f"the task's `layers`: {count} have the name {name}; with parallel.optimizer_shard each needs its own"
            )
    model.train()
    for layer in layers:
        for name, module in layer.module.named_modules():
            where = f"layer {layer.name}: {name or 'its module'}, a {type(module).__name__},"
            if module.training and getattr(module, "track_running_stats", False):
                raise UserError(
                    f"{where} keeps running statistics, which differ from rank to rank and are not saved; use a norm "
                    "without them, such as LayerNorm or GroupNorm"
                )
            if layer.recompute and recompute != "never" and _drops_anew(module):
                raise UserError(
                    f"parallel.recompute={recompute}: {where} would drop other values when it is recomputed; use "
                    "hvd_transformer.tasks.Dropout, or `recompute=False` of the Layer"
                )
    in_layers = {id(weight) for layer in layers for weight in layer.module.parameters()}
    for name, weight in model.named_parameters():
        if name in trained and id(weight) not in in_layers:
            raise UserError(
                f"the task's `layers`: no Layer has the parameter {name}; add it to the module of the Layer that uses "
                "it, or name it in `frozen`"
            )


def _drops_anew(module: nn.Module) -> bool:
    """Whether a module of torch.nn draws what it drops from torch's generator."""
    rate = getattr(module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0.0)
    return type(module).__module__.startswith("torch.nn.") and isinstance(rate, float) and rate > 0


def add_buffers(
    stages: Sequence[ModelStage],
    model: nn.Module,
    config: Config,
    mesh: ParallelMesh,
    *,
    num_hosts: int,
    splits: Splits,
    shapes: Shapes,
    row_gathered: Mapping[str, bool],
    max_bucket_bytes: int,
) -> None:
    """Give each stage buffers of its own parameters, so that it sends and updates without the others.

    `max_bucket_bytes` is the size of a buffer at most; a larger parameter gets one alone. `splits` and `shapes` are
    those of `Engine`. `row_gathered` has the name of each embedding parameter, and whether its gradient is gathered as
    rows; such a parameter gets a buffer alone. A tied parameter belongs to the last stage that has it: that of the
    output layer, where its dense gradient comes from.

    Where the transfer of a buffer can overlap with backward, embeddings, whose gradients are complete last, share no
    buffer with other parameters.
    """
    stage_of = {id(weight): stage for stage in stages for layer in stage.layers for weight in layer.module.parameters()}
    parameters: dict[ModelStage, dict[str, nn.Parameter]] = {stage: {} for stage in stages}
    for name, weight in model.named_parameters():
        if name in shapes:
            parameters[stage_of[id(weight)]][name] = weight
    no_decay = names_without_decay(model)
    alone = {name for name, is_gathered in row_gathered.items() if is_gathered}
    overlaps = num_hosts > 1 or mesh.device.type == "cuda"
    hidden = _muon_matrices(model) if config.optimizer.name == "muon" else set[str]()
    # Unsplit weights must be summed and rounded identically on all ranks of a tensor group. They need buffers of their
    # own if split weights have shards of different sizes, which changes the order of the sum (the sum of two replicas
    # is the same in any order), and if a compressed format rounds them together with split weights.
    uneven = any(shapes[name][split.dim] // split.parts % mesh.tp for name, split in splits.items() if name in shapes)
    apart = mesh.tp > 1 and ((uneven and mesh.dp > 2) or config.communication.compression != "none")
    unsplit = shapes.keys() - splits.keys() if apart else set[str]()
    for number, (stage, own) in enumerate(parameters.items()):
        own_bytes = sum(
            math.prod(shapes[name]) * weight.itemsize // (mesh.tp if name in splits else 1)
            for name, weight in own.items()
        )
        bucket_bytes = stage_bucket(max_bucket_bytes, own_bytes, mesh.zero_shard.count, overlaps=overlaps)
        embeddings = row_gathered.keys() - alone if overlaps else set()
        buffers = make_grad_buffers(
            own, no_decay, bucket_bytes, alone, mesh.zero_shard, apart=(hidden, embeddings, unsplit)
        )
        if mesh.dp_group.shares_memory:
            place_together(buffers, mesh.dp_group.zeros_like)
        matrices = None
        if hidden:
            matrices = SharedMatrices(
                [buffer for buffer in buffers if buffer.slots[0].name in hidden],
                splits=splits,
                shapes=shapes,
                # In local steps each replica computes its own update.
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
    """Give the linear layers copies of their weights in the dtype of autocast, which the buffers keep up to date."""
    places = {id(slot.parameter): (buffer, slot) for buffer in buffers for slot in buffer.slots}
    for module in model.modules():
        if isinstance(module, WeightGradLayer) and id(module.weight) in places:
            buffer, slot = places[id(module.weight)]
            module.shadow = slot.view(buffer.add_shadow(dtype))
