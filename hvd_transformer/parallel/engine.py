"""One rank's model, wired for training: stages on their devices, gradient buffers, collectives, optimizer, pipeline."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import Config
from hvd_transformer.gradients.embedding_grads import plan_embedding_grads
from hvd_transformer.gradients.local_steps import LocalSteps
from hvd_transformer.gradients.optimizer import GradNorm
from hvd_transformer.gradients.param_all_gather import make_param_all_gathers
from hvd_transformer.gradients.sync import make_grad_sync
from hvd_transformer.gradients.transfer_sizes import transfer_sizes
from hvd_transformer.gradients.update_factor import UpdateFactor
from hvd_transformer.gradients.weight_grads import install_stores
from hvd_transformer.gradients.wire.plain import WireOptions
from hvd_transformer.monitoring.timeline import Timeline
from hvd_transformer.nn.contracts import Layer, TensorGroup
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.model_stage import (
    ModelStage,
    add_buffers,
    add_shadows,
    check_layers,
    check_shared_weights,
)
from hvd_transformer.parallel.pipeline import Pipeline, worker_threads
from hvd_transformer.parallel.precision import product_dtype
from hvd_transformer.parallel.replica_check import check_replicas, checksum
from hvd_transformer.parallel.tensor_backend import StageCommunicators, connect_stages
from hvd_transformer.parallel.tensor_parallel import Communicator, RankTensorGroup, Shapes, Splits, set_tensor_groups


class Engine:
    """The wiring between model, pipeline, gradients and optimizer on one rank.

    `layers` is the whole model in order and `partition` the number of layers per stage. `shapes` are those of the
    unsplit weights that are trained, the others are frozen; the model is sharded by `splits` already. A step looks up
    about `num_tokens` tokens.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        mesh: ParallelMesh,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        partition: Sequence[int],
        splits: Splits,
        shapes: Shapes,
        num_tokens: int,
    ) -> None:
        self.config, self.world, self.mesh = config, world, mesh
        self.splits, self.shapes = splits, shapes
        transfer = transfer_sizes(mesh.device.type, mesh.dp, config.communication.bucket_mb)
        num_hosts = len(set(world.hosts))
        ends = pairwise(accumulate(partition, initial=0))
        self.stages = [
            ModelStage(layers[start:stop], device) for (start, stop), device in zip(ends, mesh.devices, strict=True)
        ]
        agree(world, lambda: check_layers(self.stages, model, shapes))
        if len(self.stages) > 1:
            agree(world, lambda: check_shared_weights(self.stages))
        self._communicators: StageCommunicators | None = None
        if mesh.tp > 1:
            self._communicators = connect_stages(config, world, mesh)
            self._set_tensor_groups(model, self._communicators.stages)
        # Where the stages have moved them to.
        self._frozen = [weight.data for name, weight in model.named_parameters() if name not in shapes]
        embeddings = plan_embedding_grads(model, config.communication.embedding_rows, num_tokens)
        add_buffers(
            self.stages,
            model,
            config,
            mesh,
            num_hosts=num_hosts,
            splits=splits,
            shapes=shapes,
            gathers={name: plan.gather for name, plan in embeddings.items()},
            most=transfer.bucket,
        )
        buffers = [stage.buffers for stage in self.stages]
        if mesh.zero_shard.count > 1:
            gathers, waits = make_param_all_gathers(layers, buffers, mesh.dp_group, transfer.parameters)
            for stage, gather in zip(self.stages, gathers, strict=True):
                stage.all_gather, stage.waits = gather, waits
        self.timeline = Timeline(world.rank, [f"stage {stage}" for stage in range(len(self.stages))])
        self.grad_sync = make_grad_sync(
            buffers,
            mesh.dp_group,
            bytes_in_flight=transfer.gradients,
            overlap=config.communication.overlap,
            compression=config.communication.compression,
            wire_options=WireOptions(
                seed=config.seed,
                powersgd_rank=config.communication.powersgd_rank,
                sharded=mesh.zero_shard.count > 1,
                world=world,
                num_hosts=num_hosts,
            ),
            embeddings=embeddings,
            timeline=self.timeline,
        )
        self.buffers = self.grad_sync.buffers
        first_local = config.optimizer.warmup_steps  # while the rate rises, weights change too much to differ
        self.local_steps = LocalSteps(self.buffers, mesh.dp_group, config.communication, first_local, self.timeline)
        for name, plan in embeddings.items():
            for embedding in plan.embeddings:
                embedding.embedding_grads = self.grad_sync.embedding_grads[name].sink()
        compiles = config.training.compile and mesh.device.type != "cpu"  # the blocks, which cannot call back then
        stores = [
            ([layer.module for layer in stage.layers if not (compiles and layer.recompute)], stage.weight_grads)
            for stage in self.stages
        ]
        install_stores(model, stores, self.grad_sync)
        if config.training.precision in ("bf16", "fp16"):
            add_shadows(model, self.buffers, product_dtype(config.training.precision))
        self.pipeline = Pipeline(
            self.stages,
            schedule=config.parallel.schedule,
            recompute=config.parallel.recompute,
            precision=config.training.precision,
            grad_sync=self.grad_sync,
            threads=worker_threads(len(self.stages)),
            timeline=self.timeline,
        )
        counts = {name: mesh.tp_rank == 0 or name in splits for name in shapes}
        norm_group = world if mesh.zero_shard.count > 1 else mesh.tp_group
        self._norm = GradNorm(counts, self.buffers[0].gradients.dtype, mesh.device, norm_group)

    def begin_forward(self) -> None:
        """Before the forward passes of a step or an evaluation: weights may have changed."""
        for stage in self.stages:
            for buffer in stage.buffers:
                buffer.parameters_changed()
                if stage.all_gather is None:  # else layers wait for their weights, and renew it then
                    buffer.renew_shadow()

    @property
    def num_parameters(self) -> int:
        """Of the whole model, as far as it is trained."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def wait_params(self) -> None:
        """Return when all parameters are whole: after an update, shards may still be in flight."""
        for stage in self.stages:
            if stage.all_gather is not None:
                stage.all_gather.wait_all()

    def grad_norm(self) -> Tensor:
        """The norm of the reduced gradient of the whole model, a scalar. Collective."""
        norms = self.pipeline.map(lambda stage: self.stages[stage].norms())
        return self._norm({name: norm for own in norms for name, norm in own.items()})

    @property
    def takes_factor(self) -> bool:
        """Whether `update` takes an `UpdateFactor`."""
        sends_as_it_is = self.config.communication.compression == "none"  # others undo what is skipped
        return sends_as_it_is and all(stage.optimizer.takes_factor for stage in self.stages)

    def update(self, factor: float | UpdateFactor, rate: float) -> None:
        """One optimizer step of all stages, side by side, with the gradients × `factor`."""
        if isinstance(factor, UpdateFactor):
            factors: list[float | UpdateFactor] = [factor.to(stage.device) for stage in self.stages]
        else:
            factors = [factor] * len(self.stages)

        def update(stage: int) -> None:
            with self.timeline.span(f"stage {stage}", "update"):
                self.stages[stage].update(factors[stage], rate)

        self.pipeline.map(update)

    def optimizer_state(self) -> list[dict[str, Tensor]]:
        """The optimizer state of each buffer, as flat tensors like its own parameters: {"exp_avg": …}."""
        return [state for stage in self.stages for state in stage.optimizer.state]

    def set_updates(self, number: int) -> None:
        """Tell the optimizers how many updates are behind the state that was loaded."""
        for stage in self.stages:
            stage.optimizer.set_updates(number)

    def exchange_weights(self) -> None:
        """Swap the raw weights, which are trained, and the averaged ones (`optimizer.ema`). Collective."""
        if self.config.optimizer.ema is None:
            return
        self.wait_params()
        for stage in self.stages:
            stage.exchange_weights()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The parameters are the averaged weights inside; without `optimizer.ema` nothing changes. Collective.

        An error leaves them so: to swap them back would take the other ranks.
        """
        self.exchange_weights()
        yield
        self.exchange_weights()

    def overflowed_in_transit(self) -> bool:
        """Whether the format of gradients in transit was too narrow for a sum of this step. Collective."""
        if self.config.communication.compression == "none":
            return False
        overflowed = torch.tensor([int(self.grad_sync.wire.overflowed)])
        return bool(self.mesh.tp_group.all_reduce_(overflowed, "wire.overflowed", "max").item())

    def wire_states(self) -> list[dict[str, Any]]:
        """What the format of gradients in transit depends on, by `tp_rank`; empty where it has no state. Collective.

        Besides the tensors of `grad_sync.wire`.
        """
        if self.config.communication.compression == "none":
            return []
        return self.mesh.tp_group.all_gather_objects(self.grad_sync.wire.state())  # replicas have the same

    def load_wire_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore them; those of another tensor group are of other buckets."""
        self.grad_sync.wire.load(states[self.mesh.tp_rank] if len(states) == self.mesh.tp else {})

    @cached_property
    def frozen_checksum(self) -> int | None:
        """Of the weights that are not trained, as they were at first; None: there are none."""
        return checksum(self._frozen) if self._frozen else None

    def check_replicas(self, when: str) -> int:
        """The checksum of the weights. Raises `ReplicasDiffer`. Collective."""
        self.wait_params()
        frozen = self.frozen_checksum or 0
        return check_replicas(self.buffers, self.world, when, self.mesh.tp, self.splits, frozen)

    def close(self) -> None:
        """End the threads of the stages, and their communicators."""
        self.pipeline.close()
        if self._communicators is not None:
            self._communicators.close()
        self.grad_sync.close()
        self.timeline.close()

    def _set_tensor_groups(self, model: nn.Module, communicators: Sequence[Communicator]) -> None:
        """Give each split layer the communicator of its stage."""
        stage_of = {
            module: number
            for number, stage in enumerate(self.stages)
            for layer in stage.layers
            for module in layer.module.modules()
        }
        modules = dict(model.named_modules())

        def group_of(name: str) -> TensorGroup:
            return RankTensorGroup(communicators[stage_of[modules[name]]], name)

        set_tensor_groups(model, self.splits, self.shapes, group_of)
