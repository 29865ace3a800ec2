"""The time of each layer of a layout: matrix products, everything else, and sums over the tensor group."""

from collections.abc import Sequence
from typing import NamedTuple

from hvd_transformer.config.schema import Config
from hvd_transformer.planning.constants import step_side
from hvd_transformer.planning.scaling.collectives import Seconds, added
from hvd_transformer.planning.scaling.layer_work import LayerWork, ModelWork
from hvd_transformer.planning.scaling.layout import Layout, Machine

# Of what a layer takes whatever its size; backward has twice as many operations.
_FORWARD_SHARE = 1 / 3


class LayerTime(NamedTuple):
    """Seconds of one layer per micro-batch."""

    forward: float
    backward: float  # weight gradients and recomputing included
    deferred: float  # of this, weight gradients that can be deferred
    sums: Seconds  # within forward and backward: what tensor parallelism adds

    @property
    def both(self) -> float:
        return self.forward + self.backward


def layer_times(work: ModelWork, config: Config, layout: Layout, machine: Machine) -> list[LayerTime]:
    """The times of all layers. Raises `UserError` if the constants lack the precision or the link."""
    recompute = config.parallel.recompute
    recomputes = recompute == "always" or (recompute == "except_last" and layout.micro_batches > 1)
    number_bytes = {"fp16": 2, "fp64": 8}.get(config.training.precision, 4)  # bfloat16 is summed in float32

    def sums_of(numbers: Sequence[float]) -> list[Seconds]:
        group = machine.tensor_group(layout)
        return [machine.seconds("all_reduce", group, number_bytes * count) for count in numbers]

    times = []
    own_layers = work.at(layout.tp, layout.micro_batch_size)
    for whole, own in zip(work.at(1, layout.micro_batch_size), own_layers, strict=True):
        forward, backward, deferred = _compute(whole, own, work, config, layout, machine)
        per_flop = deferred / own.deferred_flops if own.deferred_flops else 0.0
        beside = [per_flop * flops for flops in own.beside_sums]
        after_forward = added(sums_of(own.forward_sums))
        after_backward = added(
            _exposed(message, seconds) for message, seconds in zip(sums_of(own.backward_sums), beside, strict=True)
        )
        if recomputes and own.recompute:
            backward += forward
            after_backward = added((after_backward, after_forward))
        sums = added((after_forward, after_backward))
        times.append(LayerTime(forward + after_forward.total, backward + after_backward.total, deferred, sums))
    return times


def _exposed(message: Seconds, beside: float) -> Seconds:
    """What a sum adds to work of `beside` seconds that goes on while it travels."""
    hidden = min(beside, max(0.0, message.total - message.cpu))
    return message.times(1 - hidden / message.total)


def _compute(
    whole: LayerWork, own: LayerWork, work: ModelWork, config: Config, layout: Layout, machine: Machine
) -> list[float]:
    """Seconds of forward, of backward, and of its weight gradients.

    Matrix products run at the measured rate of their size. By `training_fraction`, the whole layer takes longer than
    that: the rest is work on single numbers, of which a rank of a tensor group has as much as of the activations.
    `layer_seconds` come on top, however small the micro-batch is.
    """
    constants, precision = machine.constants, config.training.precision
    side = step_side(layout.micro_batch_size * work.tokens, work.d_model)
    rate = constants.matmul_rate(precision, side)
    flops = whole.forward_flops + whole.backward_flops
    part = (own.forward_flops + own.backward_flops) / flops if flops else 1.0
    own_rate = constants.matmul_rate(precision, side * part ** (1 / 3))
    rest = (1 / constants.training_rate(precision, side) - 1 / rate) * (
        own.activations / whole.activations if whole.activations else part
    )
    return [
        machine.crowding(layout) * (own_flops / own_rate + whole_flops * rest + share * constants.layer_seconds)
        for own_flops, whole_flops, share in (
            (own.forward_flops, whole.forward_flops, _FORWARD_SHARE),
            (own.backward_flops, whole.backward_flops, 1 - _FORWARD_SHARE),
            (own.deferred_flops, whole.deferred_flops, 0.0),
        )
    ]
