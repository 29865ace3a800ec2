"""What layers compute and hold for one micro-batch, found by running them on fake tensors.

They have shapes, number formats and a device, but no memory and no values: a model of any size costs nothing, and
what runs are the CPU's own kernels and autocast. torch's bare meta device would do attention by other kernels, which
keep all its weights [B, H, T, T], and knows no autocast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hvd_transformer.config.schema import Config
from hvd_transformer.models.dropout import dropout_place
from hvd_transformer.models.embedding import Embedding
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.models.linear import Product
from hvd_transformer.models.losses import GPU_CHUNK
from hvd_transformer.parallel.later import Later
from hvd_transformer.parallel.pipeline import Layer, MicroBatch, Tensors
from hvd_transformer.perf.allocated import Allocated
from hvd_transformer.training.language_model_task import language_model_layers
from hvd_transformer.training.precision import autocast, weight_dtype

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
class Pass:
    """Bytes that are alive while one micro-batch goes forward and backward through neighbouring layers."""

    inputs: int
    forward: int  # at the peak of forward
    kept: int  # from forward to backward, inputs and outputs among it
    backward: int  # at the peak of backward
    late: int  # after it, where the weights' gradients wait
    outputs: Tensors


@dataclass(frozen=True)
class LayerCost:
    """One layer's weights, and its part in one micro-batch."""

    name: str
    parameters: int  # those of a tied weight at its last layer
    weight_bytes: int
    forward_flops: int
    backward_flops: int  # all of it
    late_flops: int  # of these, the weights' gradients that may wait
    recompute: bool  # whether `parallel.recompute` means this layer
    activation_bytes: int  # what its forward leaves for backward, its output among it


class FakeModel(NamedTuple):
    """A model's layers on fake tensors, one micro-batch, and what its backwards leave for later."""

    layers: Sequence[Layer]
    micro_batch: MicroBatch
    later: Later


@contextmanager
def fake_model(config: Config, vocab_size: int, num_samples: int) -> Iterator[FakeModel]:
    """The language model as in training; inside, tensors are fake."""
    # The promise is the larger one where a GPU may do the work.
    chunk = config.model.loss_chunk or (None if config.training.device == "cpu" else GPU_CHUNK)
    with FakeTensorMode(), _default_dtype(weight_dtype(config.training.precision)):
        model = LanguageModel(vocab_size, config.model.model_copy(update={"loss_chunk": chunk})).train()
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)  # a part of a bucket, which counts elsewhere
        later = Later()
        for module in model.modules():
            if isinstance(module, Embedding):
                module.take_rows = lambda tokens, rows: None
            if isinstance(module, Product) and not config.training.compile:
                module.take_product = partial(_leave, later, module)
        tokens = torch.zeros(num_samples, config.data.sequence_length, dtype=torch.int64)
        layers = language_model_layers(model)
        _forward(layers, (tokens,), (tokens,), config, again=False)  # makes the tables of positions, which stay
        yield FakeModel(layers, MicroBatch((tokens,), (tokens,)), later)


def _leave(later: Later, layer: Product, values: Tensor, grad: Tensor) -> None:
    later(partial(layer.add_product, values, grad))


def layer_costs(model: FakeModel, config: Config) -> list[LayerCost]:
    """Each alone."""
    layers, (inputs, targets), later = model
    owner = {id(weight): layer.name for layer in layers for weight in layer.module.parameters()}
    tensors, costs = inputs, []
    for layer in layers:
        own_targets = targets if layer is layers[-1] else ()
        forward_flops, backward_flops, late_flops = _flops(layer, tensors, own_targets, later, config)
        alone = run_pass([layer], tensors, own_targets, later, config)
        own = [weight for weight in layer.module.parameters() if owner[id(weight)] == layer.name]
        costs.append(
            LayerCost(
                name=layer.name,
                parameters=sum(weight.numel() for weight in own),
                weight_bytes=sum(weight.nbytes for weight in own),
                forward_flops=forward_flops,
                backward_flops=backward_flops + late_flops,
                late_flops=late_flops,
                recompute=layer.recompute,
                activation_bytes=alone.kept - alone.inputs,
            )
        )
        tensors = alone.outputs
    return costs


def run_pass(
    layers: Sequence[Layer],
    tensors: Tensors,
    targets: Tensors,
    later: Later,
    config: Config,
    *,
    again: bool = False,
    waits: bool = False,
) -> Pass:
    """As a stage of the pipeline does it. `targets` are for the model's last layer; `again`: it recomputes; `waits`:
    the weights' gradients wait for the end of backward."""
    with Allocated() as allocated:
        inputs = _received(tensors)
        input_bytes = allocated.now
        outputs = _forward(layers, inputs, targets, config, again)
        made = [(tensor.shape, tensor.dtype) for tensor in outputs]
        forward, kept = allocated.take_peak(), allocated.now
        with later.collect() if waits else nullcontext():
            _backward(outputs)
        backward = allocated.take_peak()
        del inputs, outputs
        late = allocated.now
        if waits:
            later.run()
    handed_on = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in made)
    return Pass(input_bytes, forward, kept, backward, late, handed_on)


def _flops(layer: Layer, tensors: Tensors, targets: Tensors, later: Later, config: Config) -> tuple[int, int, int]:
    """Of forward, of backward, and of what backward leaves for later. Apart from what counts bytes: these counters
    hold tensors for longer."""
    forward, backward, late = (FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS) for _ in range(3))
    with forward:
        outputs = _forward([layer], _received(tensors), targets, config, again=False)
    with backward, later.collect():
        _backward(outputs)
    with late:
        later.run()
    return forward.get_total_flops(), backward.get_total_flops(), late.get_total_flops()


def _received(tensors: Tensors) -> Tensors:
    """A stage's device has its own of what comes from the stage before, whose gradients go back."""
    return tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors)


def _backward(outputs: Tensors) -> None:
    wanting: list[Tensor] = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(wanting, [torch.ones_like(tensor) for tensor in wanting])


def _forward(layers: Sequence[Layer], inputs: Tensors, targets: Tensors, config: Config, again: bool) -> Tensors:
    tensors = inputs
    for layer in layers:
        if layer is layers[-1]:
            tensors += targets
        if again and layer.recompute:
            tensors = checkpoint(_call, layer, tensors, config, use_reentrant=False, preserve_rng_state=False)
        else:
            tensors = _call(layer, tensors, config)
    return tensors


def _call(layer: Layer, tensors: Tensors, config: Config) -> Tensors:
    with autocast(config.training.precision, torch.device("cpu")), dropout_place(0):
        result = layer.run(*tensors)
    return result if isinstance(result, tuple) else (result,)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
