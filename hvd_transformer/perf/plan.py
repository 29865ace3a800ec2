"""What a configuration needs, without training, data or a GPU: the memory of each stage, and how long stages wait."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from hvd_transformer.config.schema import Config, OptimizerConfig
from hvd_transformer.data.tokenizers import BPE_VOCAB_SIZE
from hvd_transformer.errors import UserError
from hvd_transformer.parallel import partition
from hvd_transformer.parallel.pipeline import Recompute
from hvd_transformer.parallel.schedule import Operation, Timeline, bubble, make_schedule, simulate
from hvd_transformer.perf.layer_costs import LayerCost, layer_costs, size
from hvd_transformer.training.stages import check_partition, given_partition

ScheduleName = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)

# The PyTorch tutorial's, of WikiText-2's training split.
_WIKITEXT2_WORDS = 28_783


@dataclass(frozen=True)
class StageCost:
    """Neighbouring layers on one device; memory in bytes, FLOPs of one micro-batch."""

    layers: Sequence[LayerCost]
    optimizer: int
    activations: dict[tuple[ScheduleName, Recompute], int]  # at their peak
    forward_flops: int
    backward_flops: int  # as configured: those of a recomputed layer's forward are among them

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def weights(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def gradients(self) -> int:
        """A number a weight, in the same format."""
        return self.weights


@dataclass(frozen=True)
class Plan:
    """One rank's work in one round."""

    config: Config
    vocab_size: int
    vocab_origin: str
    micro_batch_size: int  # samples; the last micro-batch may have fewer
    num_micro_batches: int
    layers: Sequence[LayerCost]
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
        )

    def bubble(self, schedule: ScheduleName) -> float:
        """The idle share of the stages' time."""
        return bubble(self.timeline(schedule))

    def speed_up(self, schedule: ScheduleName) -> float:
        """Over one device that does the work of all stages: all operations' time / the round's length."""
        return len(self.stages) * (1 - self.bubble(schedule))


def make_plan(config: Config, vocab_size: int | None = None) -> Plan:
    """Raises `UserError` where the vocabulary cannot be known, or the model not be cut as configured."""
    words, origin = _vocabulary(config, vocab_size)
    size_ = math.ceil(config.training.batch_size / config.parallel.micro_batches)
    count = math.ceil(config.training.batch_size / size_)
    check_partition(config)
    layers = layer_costs(config, words, size_)
    ends = [0]
    for number in _cut(config, layers):
        ends.append(ends[-1] + number)
    stages = [_stage(config, layers[start:stop], index, count) for index, (start, stop) in enumerate(pairwise(ends))]
    return Plan(config, words, origin, size_, count, layers, stages)


def optimizer_copies(config: OptimizerConfig) -> int:
    """Numbers of optimizer state a weight."""
    if config.name == "sgd":
        return 1 if config.momentum else 0
    return 2


def peak_activations(
    operations: Sequence[Operation], recompute: Recompute, kept: int, kept_again: int, again: int
) -> int:
    """The most bytes a stage holds while it works through its operations.

    From forward to backward a micro-batch holds `kept`, or `kept_again` where its blocks are computed again; then
    the largest of them adds `again` for the time of the backward.
    """
    last = max(operation.micro_batch for operation in operations)
    held = peak = 0
    for kind, micro_batch in operations:
        whole = recompute == "never" or (recompute == "except_last" and micro_batch == last)
        if kind == "forward":
            held += kept if whole else kept_again
            peak = max(peak, held)
        else:
            peak = max(peak, held + (0 if whole else again))
            held -= kept if whole else kept_again
    return peak


def _vocabulary(config: Config, given: int | None) -> tuple[int, str]:
    """The vocabulary's size and where it is from."""
    data = config.data
    if given is not None:
        if given < 2:
            raise UserError(f"--vocab-size {given}: must be at least 2")
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


def _cut(config: Config, layers: Sequence[LayerCost]) -> list[int]:
    """Layers a stage, as training.stages does it; "auto" by FLOPs in place of seconds."""
    given = given_partition(config, [layer.name for layer in layers])
    if given is not None:
        return given
    return partition.balanced(
        [layer.forward_flops + layer.backward_flops for layer in layers], config.parallel.pipeline
    )


def _stage(config: Config, layers: Sequence[LayerCost], index: int, count: int) -> StageCost:
    ends = layers[0].inputs, layers[-1].outputs  # the pipeline holds them for their gradients
    again = [layer for layer in layers if layer.recompute]
    kept = size(*ends, *(layer.saved for layer in layers))
    kept_again = size(*ends, *(layer.inputs if layer.recompute else layer.saved for layer in layers))
    largest = max((layer.activation_bytes - size(layer.inputs) for layer in again), default=0)
    forward_flops = sum(layer.forward_flops for layer in layers)
    backward_flops = sum(layer.backward_flops for layer in layers)
    if config.parallel.recompute == "always" or (config.parallel.recompute == "except_last" and count > 1):
        backward_flops += sum(layer.forward_flops for layer in again)
    return StageCost(
        layers=layers,
        optimizer=optimizer_copies(config.optimizer) * sum(layer.weight_bytes for layer in layers),
        activations={
            (schedule, recompute): peak_activations(
                make_schedule(schedule, config.parallel.pipeline, count)[index], recompute, kept, kept_again, largest
            )
            for schedule in SCHEDULES
            for recompute in RECOMPUTES
        },
        forward_flops=forward_flops,
        backward_flops=backward_flops,
    )
