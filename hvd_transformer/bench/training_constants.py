"""What `plan` learns from `bench train`: the constants of training on this device."""

import math
from statistics import median
from typing import NamedTuple

from hvd_transformer.bench.synthetic_task import samples_per_step
from hvd_transformer.bench.train import StepTimes, TrainResult, in_pieces
from hvd_transformer.config import Config
from hvd_transformer.planning.constants import Constants, step_side
from hvd_transformer.planning.memory_plan import batch_samples


def training_constants(config: Config, device: Constants, result: TrainResult) -> Constants:
    """The constants of the device with those of training, on rank 0."""
    if result.alone is None or result.alone.first is None:
        return device
    first, precision = result.alone.first, config.training.precision
    fraction, layer_seconds = _fitted(config, device, result)
    found = {
        "training_fraction": {**device.training_fraction, precision: fraction},
        "layer_seconds": layer_seconds,
        "optimizer_seconds": median(step.update for step in first) / result.num_parameters,
        "jitter": result.alone.jitter,
    }
    if result.world.local_size == device.devices_per_host:  # all devices of a host were busy
        found["crowding"] = max(1.0, result.alone.together / median(step.work for step in first))
    return device.model_copy(update=found)


class _Passes(NamedTuple):
    """A step of so many forwards and backwards."""

    number: float
    products: float  # seconds of its matrix products, at the rate of their size
    seconds: float


def _fitted(config: Config, device: Constants, result: TrainResult) -> tuple[float, float]:
    """`training_fraction` and `layer_seconds`, from the same step in micro-batches of one or of two sizes:

    seconds = number × layers × layer_seconds + products / training_fraction
    """
    assert result.alone is not None and result.alone.first is not None
    whole = _passes(config, device, result, result.alone.first)
    if result.alone.pieces is None:
        return min(1.0, whole.products / whole.seconds), 0.0
    pieces = _passes(in_pieces(config), device, result, result.alone.pieces)
    more_passes = pieces.number * whole.products - whole.number * pieces.products
    more_seconds = pieces.seconds * whole.products - whole.seconds * pieces.products
    layer_seconds = max(0.0, more_seconds / more_passes) / result.num_layers if more_passes > 0 else 0.0
    # Of a busy machine the steps may say that layers take longer than a step: the products need their time, too.
    most = max(0.0, whole.seconds - whole.products) / (whole.number * result.num_layers)
    layer_seconds = min(layer_seconds, most)
    rest = whole.seconds - whole.number * result.num_layers * layer_seconds
    return min(1.0, whole.products / rest), layer_seconds


def _passes(config: Config, device: Constants, result: TrainResult, steps: list[StepTimes]) -> _Passes:
    dp = result.mesh.dp
    samples = math.ceil(batch_samples(config, dp) / config.parallel.micro_batches)
    side = step_side(samples * config.data.sequence_length, config.model.d_model)
    rate = device.matmul_rate(config.training.precision, side) * len(result.mesh.devices)
    number = samples_per_step(config, dp) / dp / samples
    return _Passes(number, result.flops / rate, median(step.compute for step in steps))
