"""What layers compute and hold for one micro-batch, found by running them on fake tensors.

They have shapes, number formats and a device, but no memory and no values: a model of any size costs nothing, and
what runs are the CPU's own kernels and autocast. torch's bare meta device would do attention by other kernels, which
keep all its weights [B, H, T, T], and knows no autocast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hvd_transformer.config.schema import Config
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Layer, MicroBatch, Tensors
from hvd_transformer.nn.cross_entropy import GPU_CHUNK
from hvd_transformer.parallel.pipeline import layer_context
from hvd_transformer.parallel.precision import weight_dtype
from hvd_transformer.parallel.tensor_group import shard_model
from hvd_transformer.planning.layer_profile import (
    Context,
    backward,
    forward,
    gradients_as_in_training,
    received,
    run_pass,
)
from hvd_transformer.tasks.registry import task_class

# Matrix products that torch's counter does not know, each with its FLOPs by the shapes of its arguments.
_MORE_PRODUCTS = {
    torch.ops.aten.addmm_: lambda to, left, right, **_: 2 * left[0] * left[1] * right[1],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(grad, query, key, value)
    ),
}


@dataclass(frozen=True)
class LayerEstimate:
    """One layer's weights, and its part in one micro-batch."""

    name: str
    parameters: int  # those of a tied weight at its last layer
    weight_bytes: int
    largest_bytes: int  # of one weight
    forward_flops: int
    backward_flops: int  # all of it
    late_flops: int  # of these, the weights' gradients that may wait
    recompute: bool  # whether `parallel.recompute` means this layer
    activation_bytes: int  # what its forward leaves for backward, its output among it


class FakeModel(NamedTuple):
    """A model's layers on fake tensors, one micro-batch, what its backwards leave for later, and what is around each
    call of a layer."""

    layers: Sequence[Layer]
    micro_batch: MicroBatch
    later: WeightGradStore
    context: Context


@contextmanager
def fake_model(config: Config, vocab_size: int, num_samples: int) -> Iterator[FakeModel]:
    """The task's model as in training; inside, tensors are fake."""
    # The promise is the larger one where a GPU may do the work.
    chunk = config.model.loss_chunk or (None if config.training.device == "cpu" else GPU_CHUNK)
    with FakeTensorMode(), _default_dtype(weight_dtype(config.training.precision)):
        of_model = config.model.model_copy(update={"loss_chunk": chunk})
        planned = config.model_copy(update={"model": of_model})
        model, layers, batch, splits = task_class(config).sketch(planned, vocab_size, num_samples)
        model.train()
        if config.parallel.tensor > 1:
            shard_model(model, splits, 0, config.parallel.tensor)
        later = WeightGradStore()
        context = partial(layer_context, config.training.precision, torch.device("cpu"), (0,))

        # The gradients are parts of buckets, which count elsewhere.
        with gradients_as_in_training(layers, later, products=not config.training.compile):
            forward(
                layers, batch.inputs, batch.targets, context, again=False
            )  # makes the tables of positions, which stay
            yield FakeModel(layers, batch, later, context)


def layer_costs(model: FakeModel) -> list[LayerEstimate]:
    """Each alone."""
    layers, batch, later, context = model
    owner = {id(weight): layer.name for layer in layers for weight in layer.module.parameters()}
    tensors, targets, costs = batch.inputs, batch.targets, []
    for layer in layers:
        own_targets = targets if layer is layers[-1] else ()
        forward_flops, backward_flops, late_flops = _flops(model, layer, tensors, own_targets)
        alone, tensors = run_pass([layer], tensors, own_targets, later, context, (False, False))
        own = [weight for weight in layer.module.parameters() if owner[id(weight)] == layer.name]
        costs.append(
            LayerEstimate(
                name=layer.name,
                parameters=sum(weight.numel() for weight in own),
                weight_bytes=sum(weight.nbytes for weight in own),
                largest_bytes=max((weight.nbytes for weight in own), default=0),
                forward_flops=forward_flops,
                backward_flops=backward_flops + late_flops,
                late_flops=late_flops,
                recompute=layer.recompute,
                activation_bytes=alone.kept - alone.inputs,
            )
        )
    return costs


def _flops(model: FakeModel, layer: Layer, tensors: Tensors, targets: Tensors) -> tuple[int, int, int]:
    """Of forward, of backward, and of what backward leaves for later. Apart from what counts bytes: these counters
    hold tensors for longer."""
    counters = [FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS) for _ in range(3)]
    with counters[0]:
        outputs = forward([layer], received(tensors), targets, model.context, again=False)
    with counters[1], model.later.deferring():
        backward(outputs)
    with counters[2]:
        model.later.run_oldest()
    of_forward, of_backward, late = (counter.get_total_flops() for counter in counters)
    return of_forward, of_backward, late


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
