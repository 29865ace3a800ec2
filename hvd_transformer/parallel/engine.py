"""One rank's model, wired for training: stages on their devices, gradient buffers, collectives, optimizer, pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import Config
from hvd_transformer.gradients.embedding_grads import EmbeddingGradPlan, plan_embedding_grads
from hvd_transformer.gradients.local_steps import LocalSteps
from hvd_transformer.gradients.optimizer import GradNorm
from hvd_transformer.gradients.param_all_gather import make_param_all_gathers
from hvd_transformer.gradients.sharded_sync import make_grad_sync
from hvd_transformer.gradients.sync import GradSync
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
from hvd_transformer.parallel.tensor_parallel import RankTensorGroup, Shapes, Splits, set_tensor_groups


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
        self._transfer = transfer_sizes(mesh.device.type, mesh.dp, config.communication.bucket_mb)
        self._num_hosts = len(set(world.hosts))
        # Moves the weights to the stages' devices, before anything refers to their memory.
        self.stages = self._make_stages(model, layers, partition)
        self._communicators = self._connect_tensor_groups(model)
        # The memory on the stages' devices. Only trained weights are moved again, into the gradient buffers.
        self._frozen = [weight.data for name, weight in model.named_parameters() if name not in shapes]
        embedding_plans = plan_embedding_grads(model, config.communication.embedding_rows, num_tokens)
        # Turns trained weights into views of the buffers, which everything below works on.
        self._add_buffers(model, embedding_plans)
        if mesh.zero_shard.count > 1:
            self._add_param_all_gathers(layers)
        self.timeline = Timeline(world.rank, [f"stage {stage}" for stage in range(len(self.stages))])
        self.grad_sync = self._make_grad_sync(embedding_plans)
        self.buffers = self.grad_sync.buffers
        first_local = config.optimizer.warmup_steps  # while the rate rises, weights change too much to differ
        self.local_steps = LocalSteps(self.buffers, mesh.dp_group, config.communication, first_local, self.timeline)
        # Linear layers get slots of the buffers, and embeddings get sinks of `grad_sync`.
        self._redirect_grads(model, embedding_plans)
        if config.training.precision in ("bf16", "fp16"):
            add_shadows(model, self.buffers, product_dtype(config.training.precision))
        self.pipeline = self._make_pipeline()
        self._norm = self._make_grad_norm()

    def begin_forward(self) -> None:
        """Prepare the forward passes of a step or an evaluation, before which weights may have changed."""
        for stage in self.stages:
            for buffer in stage.buffers:
                buffer.parameters_changed()
                if stage.all_gather is None:  # otherwise layers renew it after they have waited for their weights
                    buffer.renew_shadow()

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters of the whole model."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def wait_params(self) -> None:
        """Wait until all parameters are complete: after an update, shards may still be in flight."""
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
        is_uncompressed = self.config.communication.compression == "none"  # other formats undo a skipped update
        return is_uncompressed and all(stage.optimizer.takes_factor for stage in self.stages)

    def update(self, factor: float | UpdateFactor, rate: float) -> None:
        """Run one optimizer step of all stages in parallel, with the gradients × `factor`."""
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
        """Tell the optimizers how many updates preceded the loaded state."""
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
        """Use the averaged weights as parameters inside; without `optimizer.ema` nothing changes. Collective.

        They are not swapped back after an error, as this would need the other ranks.
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
        """The state of the format of gradients in transit, by `tp_rank`; empty if it has none. Collective.

        The tensors of `grad_sync.wire` are not part of it.
        """
        if self.config.communication.compression == "none":
            return []
        return self.mesh.tp_group.all_gather_objects(self.grad_sync.wire.state())  # replicas have the same

    def load_wire_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore `wire_states`. States of another tensor degree are dropped, because their buckets differ."""
        self.grad_sync.wire.load(states[self.mesh.tp_rank] if len(states) == self.mesh.tp else {})

    @cached_property
    def frozen_checksum(self) -> int | None:
        """The checksum of the frozen weights, computed once; None if there are none."""
        return checksum(self._frozen) if self._frozen else None

    def check_replicas(self, when: str) -> int:
        """Return the checksum of the weights. Raises `ReplicasDiffer`. Collective."""
        self.wait_params()
        frozen = self.frozen_checksum or 0
        return check_replicas(self.buffers, self.world, when, self.mesh.tp, self.splits, frozen)

    def close(self) -> None:
        """End the threads of the stages, and close their communicators."""
        self.pipeline.close()
        if self._communicators is not None:
            self._communicators.close()
        self.grad_sync.close()
        self.timeline.close()

    def _make_stages(self, model: nn.Module, layers: Sequence[Layer], partition: Sequence[int]) -> list[ModelStage]:
        """Cut the model into stages on their devices. Collective. Raises `UserError` on all ranks."""
        ends = pairwise(accumulate(partition, initial=0))
        stages = [
            ModelStage(layers[start:stop], device)
            for (start, stop), device in zip(ends, self.mesh.devices, strict=True)
        ]
        parallel, sharded = self.config.parallel, self.mesh.zero_shard.count > 1
        has_one = parallel.recompute == "except_last" and parallel.micro_batches == 1  # which is the last
        recompute = "never" if has_one else parallel.recompute
        agree(self.world, lambda: check_layers(stages, model, self.shapes, recompute=recompute, sharded=sharded))
        if len(stages) > 1:
            agree(self.world, lambda: check_shared_weights(stages))
        return stages

    def _connect_tensor_groups(self, model: nn.Module) -> StageCommunicators | None:
        """Give each split layer the communicator of its stage; None without tensor parallelism. Collective."""
        if self.mesh.tp == 1:
            return None
        communicators = connect_stages(self.config, self.world, self.mesh)
        stage_of = {
            module: number
            for number, stage in enumerate(self.stages)
            for layer in stage.layers
            for module in layer.module.modules()
        }
        modules = dict(model.named_modules())

        def group_of(name: str) -> TensorGroup:
            return RankTensorGroup(communicators.stages[stage_of[modules[name]]], name)

        set_tensor_groups(model, self.splits, self.shapes, group_of)
        return communicators

    def _add_buffers(self, model: nn.Module, embedding_plans: Mapping[str, EmbeddingGradPlan]) -> None:
        add_buffers(
            self.stages,
            model,
            self.config,
            self.mesh,
            num_hosts=self._num_hosts,
            splits=self.splits,
            shapes=self.shapes,
            row_gathered={name: plan.gather for name, plan in embedding_plans.items()},
            max_bucket_bytes=self._transfer.bucket,
        )

    def _add_param_all_gathers(self, layers: Sequence[Layer]) -> None:
        """ZeRO: each stage gathers the parameters that other ranks have updated, and its layers wait for them."""
        buffers = [stage.buffers for stage in self.stages]
        gathers, waits = make_param_all_gathers(layers, buffers, self.mesh.dp_group, self._transfer.parameters)
        for stage, gather in zip(self.stages, gathers, strict=True):
            stage.all_gather, stage.waits = gather, waits

    def _make_grad_sync(self, embedding_plans: Mapping[str, EmbeddingGradPlan]) -> GradSync:
        communication = self.config.communication
        return make_grad_sync(
            [stage.buffers for stage in self.stages],
            self.mesh.dp_group,
            bytes_in_flight=self._transfer.gradients,
            overlap=communication.overlap,
            compression=communication.compression,
            wire_options=WireOptions(
                seed=self.config.seed,
                powersgd_rank=communication.powersgd_rank,
                sharded=self.mesh.zero_shard.count > 1,
                world=self.world,
                num_hosts=self._num_hosts,
            ),
            embeddings=embedding_plans,
            timeline=self.timeline,
        )

    def _redirect_grads(self, model: nn.Module, embedding_plans: Mapping[str, EmbeddingGradPlan]) -> None:
        """Make embeddings and linear layers hand their weight gradients to the engine instead of autograd."""
        for name, plan in embedding_plans.items():
            for embedding in plan.embeddings:
                embedding.embedding_grads = self.grad_sync.embedding_grads[name].sink()
        # Compiled graphs, those of the blocks, cannot call back into Python: there autograd keeps the weight gradients.
        compiles_blocks = self.config.training.compile and self.mesh.device.type != "cpu"
        stores = [
            (
                [layer.module for layer in stage.layers if not (compiles_blocks and layer.recompute)],
                stage.weight_grads,
            )
            for stage in self.stages
        ]
        install_stores(model, stores, self.grad_sync)

    def _make_pipeline(self) -> Pipeline:
        return Pipeline(
            self.stages,
            schedule=self.config.parallel.schedule,
            recompute=self.config.parallel.recompute,
            precision=self.config.training.precision,
            grad_sync=self.grad_sync,
            threads=worker_threads(len(self.stages)),
            timeline=self.timeline,
        )

    def _make_grad_norm(self) -> GradNorm:
        mesh = self.mesh
        # Weights that are not split are equal on all ranks of a tensor group: the first one counts them.
        counts = {name: mesh.tp_rank == 0 or name in self.splits for name in self.shapes}
        group = self.world if mesh.zero_shard.count > 1 else mesh.tp_group
        return GradNorm(counts, self.buffers[0].gradients.dtype, mesh.device, group)
