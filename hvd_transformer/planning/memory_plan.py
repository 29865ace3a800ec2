"""What a configuration needs, without training, data or a GPU: the memory of each stage, and how long stages wait."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import get_args

from hvd_transformer.config.schema import Config
from hvd_transformer.data.tokenizers import BPE_VOCAB_SIZE
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.optimizer import copies_per_weight
from hvd_transformer.gradients.sync import MAX_IN_FLIGHT
from hvd_transformer.parallel.pipeline import Recompute
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES, ScheduleName, make_schedule
from hvd_transformer.planning import partition
from hvd_transformer.planning.layer_profile import PASS_MODES, PassMemory, PassMode, run_pass, stage_activations
from hvd_transformer.planning.model_costs import LayerEstimate, fake_model, layer_costs
from hvd_transformer.planning.partition import check_partition, given_partition
from hvd_transformer.planning.schedule_drawing import Timeline, bubble, simulate

RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)

# The PyTorch tutorial's, of WikiText-2's training split.
_WIKITEXT2_WORDS = 28_783


@dataclass(frozen=True)
class StageCost:
    """Neighbouring layers on one device; memory in bytes, FLOPs of one micro-batch."""

    layers: Sequence[LayerEstimate]
    gradients: int  # at their peak
    optimizer: int
    activations: dict[tuple[ScheduleName, Recompute], int]  # at their peak
    forward_flops: int
    backward_flops: int  # as configured: those of a recomputed layer's forward are among them
    late_flops: int  # those of backward that may wait

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def weights(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's work in one round."""

    config: Config
    dp: int
    vocab_size: int
    vocab_origin: str
    num_samples: int  # of a round
    micro_batch_size: int  # samples; the last micro-batch may have fewer
    num_micro_batches: int
    layers: Sequence[LayerEstimate]
    stages: Sequence[StageCost]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def memory(self, stage: StageCost) -> list[int]:
        """Weights, gradients, optimizer state and activations as configured."""
        parallel = self.config.parallel
        activations = stage.activations[parallel.schedule, parallel.recompute]
        return [stage.weights, stage.gradients, stage.optimizer, activations]

    def timeline(self, schedule: ScheduleName, num_micro_batches: int | None = None) -> Timeline:
        """One round, where a stage's time is its FLOPs; the slowest stage needs 1 for a micro-batch."""
        slowest = max(stage.forward_flops + stage.backward_flops for stage in self.stages)
        return simulate(
            make_schedule(schedule, len(self.stages), num_micro_batches or self.num_micro_batches),
            [stage.forward_flops / slowest for stage in self.stages],
            [stage.backward_flops / slowest for stage in self.stages],
            [stage.late_flops / slowest for stage in self.stages],
        )

    def bubble(self, schedule: ScheduleName) -> float:
        """The idle share of the stages' time."""
        return bubble(self.timeline(schedule))

    def speed_up(self, schedule: ScheduleName) -> float:
        """Over one device that does the work of all stages: all operations' time / the round's length."""
        return len(self.stages) * (1 - self.bubble(schedule))


def make_plan(config: Config, vocab_size: int | None = None, ranks: int | None = None) -> MemoryPlan:
    """For one of so many ranks (None: of one replica's).

    Raises `UserError` where the vocabulary cannot be known, or the model not be cut as configured.
    """
    dp = _replicas(config, ranks)
    words, origin = _vocabulary(config, vocab_size)
    samples = config.training.batch_size
    if config.data.batch_tokens is not None and config.task != "language_model":
        samples = max(1, config.data.batch_tokens // config.data.sequence_length)
    size_ = math.ceil(samples / config.parallel.micro_batches)
    count = math.ceil(samples / size_)
    check_partition(config)
    with fake_model(config, words, size_) as model:
        costs, stages = layer_costs(model), []
        layers, batch, later, context = model
        tensors, targets = batch.inputs, batch.targets
        ends = [0, *accumulate(_cut(config, costs))]
        for index, (start, stop) in enumerate(pairwise(ends)):
            own_targets = targets if stop == len(layers) else ()
            runs = {way: run_pass(layers[start:stop], tensors, own_targets, later, context, way) for way in PASS_MODES}
            passes = {way: found for way, (found, _) in runs.items()}
            stages.append(_stage(config, costs[start:stop], index, count, passes, dp))
            tensors = runs[False, False][1]
    return MemoryPlan(config, dp, words, origin, samples, size_, count, costs, stages)


def _replicas(config: Config, ranks: int | None) -> int:
    tensor, shard = config.parallel.tensor, config.parallel.optimizer_shard
    if ranks is None:
        if shard != "none":
            raise UserError(f"parallel.optimizer_shard={shard}: shared by how many? Give -np, the job's ranks")
        return 1
    if ranks < 1 or ranks % tensor:
        raise UserError(f"-np {ranks}: must be a multiple of parallel.tensor={tensor}, at least {tensor}")
    return ranks // tensor


def _vocabulary(config: Config, given: int | None) -> tuple[int, str]:
    """The vocabulary's size and where it is from."""
    data = config.data
    if given is not None:
        if not 2 <= given <= 2**31:
            raise UserError(f"--vocab-size {given}: must be at least 2 and at most {2**31}")
        return given, "--vocab-size"
    if data.vocab_size is not None:
        return data.vocab_size, "data.vocab_size"
    if data.tokenizer == "bpe":
        return BPE_VOCAB_SIZE, "the default of data.tokenizer=bpe"
    if (data.source, data.tokenizer, data.min_frequency) == ("wikitext2", "basic_english", 1):
        return _WIKITEXT2_WORDS, "assumed: the PyTorch tutorial's, of WikiText-2"
    raise UserError(
        f"data.source={data.source}, data.tokenizer={data.tokenizer}: the vocabulary is known only when the data is "
        "prepared; give --vocab-size N"
    )


def _cut(config: Config, layers: Sequence[LayerEstimate]) -> list[int]:
    """Layers a stage, as `planning.partition` does it; "auto" by FLOPs in place of seconds."""
    given = given_partition(config, [layer.name for layer in layers])
    if given is not None:
        return given
    return partition.balanced(
        [layer.forward_flops + layer.backward_flops for layer in layers], config.parallel.pipeline
    )


def _stage(
    config: Config,
    layers: Sequence[LayerEstimate],
    index: int,
    count: int,
    passes: Mapping[PassMode, PassMemory],
    dp: int,
) -> StageCost:
    """Stage `index`, of `count` micro-batches, on one of `dp` replicas."""
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
    weights = sum(layer.weight_bytes for layer in layers)
    gradients, optimizer = (math.ceil(numbers * weights) for numbers in copies_per_weight(config, dp))
    if gradients < weights:  # and those of a bucket that fills, and of buckets on their way
        bucket = max(int(config.communication.bucket_mb * 2**20), *(layer.largest_bytes for layer in layers))
        gradients += min(weights, bucket + MAX_IN_FLIGHT)
    return StageCost(
        layers=layers,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        forward_flops=sum(layer.forward_flops for layer in layers),
        backward_flops=backward_flops,
        late_flops=sum(layer.late_flops for layer in layers),
    )
