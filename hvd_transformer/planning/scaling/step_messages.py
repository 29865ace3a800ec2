"""One step as stretches of work, with the messages of data parallelism that they send and need."""

import math
from collections.abc import Sequence

from hvd_transformer.config.schema import Config
from hvd_transformer.gradients.transfer_sizes import stage_bucket, transfer_sizes
from hvd_transformer.gradients.wire.choice import RATIOS
from hvd_transformer.planning.scaling.buckets import Bucket, gathers_rows, make_buckets
from hvd_transformer.planning.scaling.collectives import Collective, Seconds
from hvd_transformer.planning.scaling.layer_times import LayerTime
from hvd_transformer.planning.scaling.layer_work import LayerWork
from hvd_transformer.planning.scaling.layout import Layout, Machine
from hvd_transformer.planning.scaling.replay import Work

# Bytes in transit per byte of gradient.
COMPRESSED = {**RATIOS, "fp16_fp32_sum": RATIOS["fp16"]}


class StepMessages:
    """The messages of one rank's step. `layers` are its own, `stages` the [start, stop) of each stage in them.

    A replica's step looks up `tokens` tokens.
    """

    def __init__(
        self,
        layers: Sequence[LayerWork],
        stages: Sequence[tuple[int, int]],
        tokens: int,
        config: Config,
        layout: Layout,
        machine: Machine,
    ) -> None:
        self._layout, self._machine, self._overlap = layout, machine, config.communication.overlap
        self._shard = config.parallel.optimizer_shard if layout.dp > 1 else "none"
        self._group = machine.data_group(layout)
        self._number_bytes = 8 if config.training.precision == "fp64" else 4
        ratio = COMPRESSED[config.communication.compression]
        self._sent_bytes = self._number_bytes * ratio
        self._row_bytes = self._number_bytes * max(ratio, RATIOS["int8"])  # int4 sends rows in 8 bits
        looked_up = {"auto": tokens * layout.dp, "always": 0, "never": math.inf}[config.communication.embedding_rows]
        transfer = transfer_sizes(machine.device, layout.dp, config.communication.bucket_mb)
        overlaps = machine.device == "cuda" or machine.num_hosts(layout) > 1
        num_shards = layout.dp if self._shard != "none" else 1
        self._buckets: list[Bucket] = []
        for start, stop in reversed(stages):
            stage_bytes = int(self._number_bytes * sum(layer.parameters for layer in layers[start:stop]))
            size = stage_bucket(transfer.bucket, stage_bytes, num_shards, overlaps=overlaps)
            max_elements = size / self._number_bytes
            self._buckets += make_buckets(layers, start, stop, max_elements, looked_up, overlaps=overlaps)
        self._row_numbers = [
            weight.width * tokens * layout.dp
            for layer in layers
            for weight in layer.weights
            if gathers_rows(weight, looked_up)
        ]

        self._totals = machine.seconds("all_reduce", machine.world(layout), 64)  # losses and counts

    def steps(self, times: Sequence[LayerTime], span: float) -> list[Work]:
        """The step in the order of time; `times` are those of the layers, `span` from first forward to last backward.

        Forward and backward of all layers are the two ends, also of a pipeline: there the first micro-batch fills it,
        and the last one's backward drains it.
        """
        gathered = sorted(self._buckets, key=lambda bucket: bucket.first_layer) if self._shard != "none" else []
        gathers = [self._seconds("all_gather", self._number_bytes * bucket.num_elements) for bucket in gathered]
        forward = [
            Work(time.forward, needs=sum(bucket.first_layer <= index for bucket in gathered))
            for index, time in enumerate(times)
        ]
        middle = [Work(0.0, [self._totals]), Work(max(0.0, span - sum(time.both for time in times)))]
        if self._shard == "gradients":  # every backward sends, and has sent before the last one does
            again = [self._reduce(bucket) for bucket in self._buckets] * (self._layout.passes - 1)
            middle = [Work(0.0, again), *middle, Work(0.0, needs=len(gathers) + len(again))]
        early = [bucket for bucket in self._buckets if self._early(bucket)]
        backward = [
            Work(times[index].backward, [self._reduce(bucket) for bucket in early if bucket.first_layer == index])
            for index in reversed(range(len(times)))
        ]
        late = [self._reduce(bucket) for bucket in self._buckets if not self._early(bucket)]
        rows = [self._seconds("all_gather", self._row_bytes * numbers) for numbers in self._row_numbers]
        return [Work(0.0, gathers), *forward, *middle, *backward, Work(0.0, [*late, *rows])]

    def _early(self, bucket: Bucket) -> bool:
        return self._overlap and not bucket.at_end

    def _reduce(self, bucket: Bucket) -> Seconds:
        kind: Collective = "all_reduce" if self._shard == "none" else "reduce_scatter"
        return self._seconds(kind, self._sent_bytes * bucket.num_elements)

    def _seconds(self, kind: Collective, num_bytes: float) -> Seconds:
        return self._machine.seconds(kind, self._group, num_bytes)
