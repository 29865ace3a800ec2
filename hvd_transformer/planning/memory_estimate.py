"""The memory of each stage in one configuration, in about a second: what `make_plan` says, and no more."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from hvd_transformer.config.schema import Config
from hvd_transformer.parallel.pipeline_schedule import make_schedule
from hvd_transformer.planning.memory_plan import batch_samples, gradients_and_optimizer
from hvd_transformer.planning.model_costs import FakeModel, LayerEstimate, fake_model, layer_costs
from hvd_transformer.planning.partition import balanced, check_partition, given_partition
from hvd_transformer.planning.pass_memory import (
    PASS_MODES,
    AllocationTracker,
    PassMode,
    forward,
    join_modes,
    received,
    stage_activations,
)


class MemoryEstimate(NamedTuple):
    """Bytes that one stage has at its peak; `loss`: what of the activations the logits and the loss take at most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(config: Config, vocab_size: int, dp: int, *, evaluation: bool = False) -> list[MemoryEstimate]:
    """The estimate of each stage on one of `dp` replicas, in a training step or in an `evaluation`.

    Raises `UserError` if the task cannot be planned, or not be partitioned as configured.
    """
    check_partition(config)
    samples = batch_samples(config, dp)
    size = math.ceil(samples / config.parallel.micro_batches)
    if evaluation:
        size = config.training.eval_batch_size or batch_samples(config)
    with fake_model(config, vocab_size, size) as model:
        costs = layer_costs(model, PASS_MODES[:1] if evaluation else _modes(config))
        names = [layer.name for layer in model.layers]
        flops = [layer.forward_flops + layer.backward_flops for layer in costs]
        partition = given_partition(config, names) or balanced(flops, config.parallel.pipeline)
        stages = [costs[start:stop] for start, stop in pairwise(accumulate(partition, initial=0))]
        if evaluation:
            activations = _evaluation_activations(model, partition)
        else:
            schedule = make_schedule(config.parallel.schedule, len(stages), math.ceil(samples / size))
            activations = [
                stage_activations(
                    operations, index, config.parallel.recompute, join_modes(layer.passes for layer in stage)
                )
                for index, (operations, stage) in enumerate(zip(schedule, stages, strict=True))
            ]
    loss = _loss(costs[-1])
    return [
        MemoryEstimate(
            sum(layer.weight_bytes + layer.shadow_bytes for layer in stage),
            *gradients_and_optimizer(config, stage, dp),
            own,
            min(own, loss) if stage is stages[-1] else 0,
        )
        for stage, own in zip(stages, activations, strict=True)
    ]


def _modes(config: Config) -> list[PassMode]:
    """Pass modes that a stage may use; without recompute first."""
    parallel = config.parallel
    defers = parallel.pipeline > 1 or parallel.schedule == "zero_bubble"
    recomputes = parallel.recompute != "never"
    return [mode for mode in PASS_MODES if (recomputes or not mode.recompute) and (defers or not mode.defer)]


def _loss(head: LayerEstimate) -> int:
    alone = head.passes[PASS_MODES[0]]
    return max(alone.forward, alone.backward) - alone.inputs


def _evaluation_activations(model: FakeModel, partition: Sequence[int]) -> list[int]:
    """The peak of each stage while a batch goes forward, without anything kept for backward."""
    found, tensors = [], model.micro_batch.inputs
    for start, stop in pairwise(accumulate(partition, initial=0)):
        targets = model.micro_batch.targets if stop == len(model.layers) else ()
        with torch.no_grad(), AllocationTracker() as allocated:
            inputs = received(tensors)
            tensors = forward(model.layers[start:stop], inputs, targets, model.context, recompute=False)
            found.append(allocated.take_peak())
    return found
