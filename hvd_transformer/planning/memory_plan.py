"""Estimates the memory and the pipeline bubble of each stage from the configuration alone: no data, no GPU."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import get_args

from hvd_transformer.config.batch_size import check_step_size, cuts_windows
from hvd_transformer.config.mixture import origin
from hvd_transformer.config.schema import Config
from hvd_transformer.data.tokenizers import BPE_VOCAB_SIZE
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.optimizer import copies_per_weight
from hvd_transformer.gradients.transfer_sizes import transfer_sizes
from hvd_transformer.parallel.pipeline import Recompute
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES, ScheduleName, make_schedule
from hvd_transformer.planning.model_costs import LayerEstimate, fake_model, for_gpu, layer_costs
from hvd_transformer.planning.partition import balanced, check_partition, given_partition
from hvd_transformer.planning.pass_memory import PASS_MODES, PassMemory, PassMode, run_pass, stage_activations
from hvd_transformer.planning.schedule_drawing import Timeline, bubble, simulate

RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)

# The vocabulary of the PyTorch tutorial, from WikiText-2's training split.
_WIKITEXT2_WORDS = 28_783


@dataclass(frozen=True)
class StageCost:
    """The cost of one pipeline stage: memory in bytes, FLOPs per micro-batch."""

    layers: Sequence[LayerEstimate]
    gradients: int  # at the peak
    optimizer: int
    activations: dict[tuple[ScheduleName, Recompute], int]  # at the peak
    forward_flops: int
    backward_flops: int  # with the recomputed forward, if configured
    deferred_flops: int  # of these, the weight gradients that can be deferred

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def weights(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def shadows(self) -> int:
        """Bytes of the 16-bit copies of the weights that mixed precision keeps."""
        return sum(layer.shadow_bytes for layer in self.layers)


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank needs for one accumulation step."""

    config: Config
    dp: int
    vocab_size: int
    vocab_origin: str
    num_samples: int  # per accumulation step
    micro_batch_size: int  # in samples; the last micro-batch may be smaller
    num_micro_batches: int
    layers: Sequence[LayerEstimate]
    stages: Sequence[StageCost]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def memory(self, stage: StageCost) -> list[int]:
        """Bytes of weights, gradients, optimizer state and activations, as configured."""
        parallel = self.config.parallel
        activations = stage.activations[parallel.schedule, parallel.recompute]
        return [stage.weights + stage.shadows, stage.gradients, stage.optimizer, activations]

    def timeline(self, schedule: ScheduleName, num_micro_batches: int | None = None) -> Timeline:
        """One simulated accumulation step. Time is proportional to FLOPs: 1 per micro-batch in the slowest stage."""
        slowest = max(stage.forward_flops + stage.backward_flops for stage in self.stages)
        return simulate(
            make_schedule(schedule, len(self.stages), num_micro_batches or self.num_micro_batches),
            [stage.forward_flops / slowest for stage in self.stages],
            [stage.backward_flops / slowest for stage in self.stages],
            [stage.deferred_flops / slowest for stage in self.stages],
        )

    def bubble(self, schedule: ScheduleName) -> float:
        """The idle fraction of the stages' time."""
        return bubble(self.timeline(schedule))


def make_plan(config: Config, vocab_size: int | None = None, ranks: int | None = None) -> MemoryPlan:
    """The plan for one rank of a job with `ranks` ranks (None: one replica).

    Raises `UserError` if the vocabulary size is unknown or the model cannot be partitioned as configured.
    """
    dp = num_replicas(config, ranks)
    vocab_size, origin = vocabulary(config, vocab_size)
    samples = batch_samples(config, dp)
    micro_batch_size = math.ceil(samples / config.parallel.micro_batches)
    count = math.ceil(samples / micro_batch_size)
    check_partition(config)
    with fake_model(config, vocab_size, micro_batch_size) as model:
        costs, stages = layer_costs(model), []
        layers, batch, store, context, compiled = model
        tensors, targets = batch.inputs, batch.targets
        flops = [
            layer.forward_flops + layer.backward_flops for layer in costs
        ]  # for "auto", which measures in training
        partition = given_partition(config, [layer.name for layer in layers]) or balanced(
            flops, config.parallel.pipeline
        )
        for index, (start, stop) in enumerate(pairwise(accumulate(partition, initial=0))):
            own_layers, own_targets = layers[start:stop], targets if stop == len(layers) else ()
            runs = {
                mode: run_pass(own_layers, tensors, own_targets, store, context, mode, compiled=compiled)
                for mode in PASS_MODES
            }
            passes = {mode: memory for mode, (memory, _) in runs.items()}
            stages.append(_stage(config, costs[start:stop], index, count, passes, dp))
            tensors = runs[PassMode(recompute=False, defer=False)][1]
    return MemoryPlan(config, dp, vocab_size, origin, samples, micro_batch_size, count, costs, stages)


def num_replicas(config: Config, ranks: int | None) -> int:
    """Number of data-parallel replicas of a job with this many ranks; None: one replica.

    Raises `UserError` if the ranks do not fit the configuration.
    """
    tensor, shard = config.parallel.tensor, config.parallel.optimizer_shard
    if ranks is None:
        if shard != "none":
            raise UserError(
                f"parallel.optimizer_shard={shard}: needs -np, the number of ranks that share the optimizer"
            )
        return 1
    if ranks < 1 or ranks % tensor:
        raise UserError(f"-np {ranks}: must be a multiple of parallel.tensor={tensor}, at least {tensor}")
    check_step_size(config, ranks // tensor)
    return ranks // tensor


def known_vocabulary(config: Config) -> tuple[int, str] | None:
    """The size of the vocabulary and its origin, where the configuration tells it."""
    data = config.data
    if config.model.vocab_size is not None:
        return config.model.vocab_size, "model.vocab_size"
    if data.vocab_size is not None:
        return data.vocab_size, "data.vocab_size"
    if data.tokenizer == "bpe":
        return BPE_VOCAB_SIZE, "the default of data.tokenizer=bpe"
    if (data.source, data.tokenizer, data.min_frequency) == ("wikitext2", "basic_english", 1):
        return _WIKITEXT2_WORDS, "assumed: WikiText-2, as in the PyTorch tutorial"
    return None


def batch_samples(config: Config, dp: int | None = None) -> int:
    """Samples per replica and accumulation step; at most, where they differ in length.

    One of `dp` replicas has less than `training.batch_size` where its part of `training.global_batch_size` is smaller.
    """
    if config.data.batch_tokens is not None:
        longest = max(config.data.length_of(role) for role in ("source", "target"))
        return max(1, config.data.batch_tokens // longest)
    training = config.training
    if dp is None or training.global_batch_size is None or not cuts_windows(config):
        return training.batch_samples
    return min(training.batch_samples, math.ceil(training.global_batch_size / dp))


def vocabulary(config: Config, given: int | None) -> tuple[int, str]:
    """The size of the vocabulary, and its origin. Raises `UserError` if it is unknown."""
    data = config.data
    if given is not None:
        if not 2 <= given <= 2**31:
            raise UserError(f"--vocab-size {given}: must be at least 2 and at most {2**31}")
        if config.model.vocab_size is not None and config.model.vocab_size < given:
            raise UserError(f"model.vocab_size={config.model.vocab_size}: must be at least --vocab-size {given}")
        return given, "--vocab-size"
    if known := known_vocabulary(config):
        return known
    raise UserError(
        f"{origin(data)}, data.tokenizer={data.tokenizer}: the vocabulary size is known only after the "
        "data is prepared; give --vocab-size N"
    )


def _stage(
    config: Config,
    layers: Sequence[LayerEstimate],
    index: int,
    count: int,
    passes: Mapping[PassMode, PassMemory],
    dp: int,
) -> StageCost:
    """The cost of stage `index` with `count` micro-batches, on one of `dp` replicas."""
    recompute, num_stages = config.parallel.recompute, config.parallel.pipeline
    backward_flops = sum(layer.backward_flops for layer in layers)
    if recompute == "always" or (recompute == "except_last" and count > 1):
        backward_flops += sum(layer.forward_flops for layer in layers if layer.recompute)
    activations = {
        (schedule, setting): stage_activations(operations, index, setting, passes)
        for schedule in SCHEDULES
        for operations in [make_schedule(schedule, num_stages, count)[index]]
        for setting in RECOMPUTES
    }
    gradients, optimizer = gradients_and_optimizer(config, layers, dp)
    return StageCost(
        layers=layers,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        forward_flops=sum(layer.forward_flops for layer in layers),
        backward_flops=backward_flops,
        deferred_flops=sum(layer.deferred_flops for layer in layers),
    )


def gradients_and_optimizer(config: Config, layers: Sequence[LayerEstimate], dp: int) -> tuple[int, int]:
    """Bytes of a stage's gradients at the peak, and of its optimizer state, on one of `dp` replicas."""
    weights = sum(layer.weight_bytes for layer in layers)
    by_muon = sum(layer.hidden_bytes for layer in layers) if config.optimizer.name == "muon" else 0
    of_gradients, of_optimizer = copies_per_weight(config, dp)
    _, of_muon = copies_per_weight(config, dp, by_muon=True)
    gradients = math.ceil(of_gradients * weights)
    optimizer = math.ceil(of_optimizer * (weights - by_muon) + of_muon * by_muon)
    if gradients < weights:  # sharded: also whole gradients, in a bucket that fills and in buckets in flight
        transfer = transfer_sizes("cuda" if for_gpu(config) else "cpu", dp, config.communication.bucket_mb)
        bucket = max(transfer.bucket, *(layer.largest_bytes for layer in layers))
        gradients += min(weights, bucket + transfer.gradients)
    return gradients, optimizer
