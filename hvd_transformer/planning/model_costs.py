"""FLOPs and memory of each layer for one micro-batch, found by running the layers on fake tensors.

Fake tensors have shapes, dtypes and a device, but no memory and no values: a model of any size costs nothing, and the
operators are those of the CPU, with autocast. torch's meta device would use other attention kernels, which keep all
attention weights [B, H, T, T], and has no autocast.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.muon import hidden_matrices
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Layer, MicroBatch, Tensors
from hvd_transformer.nn.cross_entropy import GPU_CHUNK
from hvd_transformer.nn.dropout import Dropout
from hvd_transformer.nn.dry_run import assume_gpu, dry_run
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.parallel.pipeline import layer_context
from hvd_transformer.parallel.precision import product_dtype, weight_dtype
from hvd_transformer.parallel.tensor_parallel import shard_model
from hvd_transformer.planning.layer_profile import gradients_as_in_training
from hvd_transformer.planning.pass_memory import (
    PASS_MODES,
    Context,
    PassMemory,
    PassMode,
    backward,
    forward,
    received,
    run_pass,
)
from hvd_transformer.tasks.registry import task_class

# FLOPs, from the shapes of the arguments, of matrix products that torch's FLOP counter does not know.
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
    """The weights of one layer, and its FLOPs and activations for one micro-batch."""

    name: str
    parameters: int  # a tied weight counts at the last layer that uses it
    weight_bytes: int
    largest_bytes: int  # of the largest weight
    hidden_bytes: int  # of the weights that Muon updates, if it is the optimizer
    shadow_bytes: int  # of the weights in 16 bits, beside
    forward_flops: int
    backward_flops: int  # weight gradients included
    deferred_flops: int  # of these, the weight gradients that can be deferred
    recompute: bool  # whether `parallel.recompute` applies to this layer
    activation_bytes: int  # kept by forward for backward, the output included
    passes: Mapping[PassMode, PassMemory]  # alone, without the other layers of its stage


class FakeModel(NamedTuple):
    """A model's layers and one micro-batch, on fake tensors."""

    layers: Sequence[Layer]
    micro_batch: MicroBatch
    store: WeightGradStore  # of deferred weight gradients
    context: Context  # each layer runs inside `context()`
    compiled: bool = False  # blocks are, for a GPU


@contextmanager
def fake_model(config: Config, vocab_size: int, num_samples: int) -> Iterator[FakeModel]:
    """The model as in training. Tensors that are created inside this context are fake.

    Raises `UserError` if one of them has more bytes than a 64-bit number tells.
    """
    on_gpu = for_gpu(config)
    chunk = config.model.loss_chunk or (GPU_CHUNK if on_gpu else None)
    with ExitStack() as stack:
        for inside in (_sizes_in_64_bits(), FakeTensorMode(), assume_gpu(on_gpu), dry_run("memory")):
            stack.enter_context(inside)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(weight_dtype(config.training.precision))
        planned = config.model_copy(update={"model": config.model.model_copy(update={"loss_chunk": chunk})})
        model, layers, batch, splits = task_class(config).sketch(planned, vocab_size, num_samples)
        model.train()
        if on_gpu:
            _fuse_norms(model)
        shard_model(model, splits, 0, config.parallel.tensor)
        _add_shadows(config, model)
        store = WeightGradStore()
        context = partial(layer_context, config.training.precision, torch.device("cpu"), (0,))
        # Weight gradients are in gradient buffers, which are counted apart from activations. Compiled blocks of a GPU
        # leave them to autograd.
        blocks_compiled = config.training.compile and on_gpu
        with gradients_as_in_training(layers, store, blocks=not blocks_compiled):
            # Creates the position tables, which stay.
            forward(layers, batch.inputs, batch.targets, context, recompute=False)
            yield FakeModel(layers, batch, store, context, blocks_compiled)


@contextmanager
def _sizes_in_64_bits() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        sizes = re.search(r"overflowed with sizes=(\[.*?\])", str(error))
        if sizes is None:
            raise
        raise UserError(f"the model needs a tensor of sizes {sizes[1]}: more bytes than 64 bits count") from None


def for_gpu(config: Config) -> bool:
    """Whether what is planned is a GPU's work: as configured, or because there is one here."""
    wanted = config.training.device
    return wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())


def _add_shadows(config: Config, model: nn.Module) -> None:
    """The weights in 16 bits that mixed precision multiplies by."""
    if config.training.precision in ("bf16", "fp16"):
        for module in model.modules():
            if isinstance(module, WeightGradLayer):
                module.shadow = torch.empty_like(module.weight, dtype=product_dtype(config.training.precision))


def _fuse_norms(model: nn.Module) -> None:
    """Let root mean square norms keep what a GPU's keep, which is what layer norms keep. A CPU's are several steps."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(_layer_norm, module)  # type: ignore[method-assign]


def _layer_norm(module: nn.RMSNorm, values: Tensor) -> Tensor:
    return F.layer_norm(values, module.normalized_shape, module.weight)


def layer_costs(model: FakeModel, modes: Sequence[PassMode] = PASS_MODES[:1]) -> list[LayerEstimate]:
    """The cost of each layer, run on its own; its memory also in other modes than the plain first one.

    Blocks that are alike are run once, so that time does not grow with the depth of the model.
    """
    layers, batch, store, context, compiled = model
    owner = {id(weight): layer.name for layer in layers for weight in layer.module.parameters()}
    found: dict[Hashable, tuple[list[int], dict[PassMode, PassMemory], Tensors]] = {}
    hidden = {id(weight) for weight in hidden_matrices([layer.module for layer in layers])}
    linears = (module for layer in layers for module in layer.module.modules() if isinstance(module, WeightGradLayer))
    shadowed = {id(linear.weight) for linear in linears if linear.shadow is not None}
    tensors, targets, costs = batch.inputs, batch.targets, []
    for layer in layers:
        own_targets = targets if layer is layers[-1] else ()
        kind = (_kind(layer), *((tensor.shape, tensor.dtype) for tensor in (*tensors, *own_targets)))
        if kind not in found:
            flops = _flops(model, layer, tensors, own_targets)
            runs = {
                mode: run_pass([layer], tensors, own_targets, store, context, mode, compiled=compiled) for mode in modes
            }
            found[kind] = flops, {mode: memory for mode, (memory, _) in runs.items()}, runs[modes[0]][1]
        (forward_flops, backward_flops, deferred_flops), passes, tensors = found[kind]
        own = [weight for weight in layer.module.parameters() if owner[id(weight)] == layer.name]
        costs.append(
            LayerEstimate(
                name=layer.name,
                parameters=sum(weight.numel() for weight in own),
                weight_bytes=sum(weight.nbytes for weight in own),
                largest_bytes=max((weight.nbytes for weight in own), default=0),
                hidden_bytes=sum(weight.nbytes for weight in own if id(weight) in hidden),
                shadow_bytes=sum(2 * weight.numel() for weight in own if id(weight) in shadowed),
                forward_flops=forward_flops,
                backward_flops=backward_flops + deferred_flops,
                deferred_flops=deferred_flops,
                recompute=layer.recompute,
                activation_bytes=passes[modes[0]].kept - passes[modes[0]].inputs,
                passes=passes,
            )
        )
    return costs


def _kind(layer: Layer) -> Hashable:
    """Key that is equal for layers with the same costs: the same work on inputs of the same shape."""
    run = layer.run.func if isinstance(layer.run, partial) and layer.run.args == (layer.module,) else layer.run
    plain = tuple(
        (type(module), *((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str))))
        for module in layer.module.modules()
        if not isinstance(module, Dropout)  # all have the same rate, and a number of their own
    )
    shapes = tuple(weight.shape for weight in layer.module.parameters())
    return layer.recompute, None if run is layer.module else run, plain, shapes


def _flops(model: FakeModel, layer: Layer, tensors: Tensors, targets: Tensors) -> list[int]:
    """FLOPs of forward, of backward, and of the deferred weight gradients.

    This is a run of its own because FLOP counters keep tensors alive, which would disturb the memory count.
    """
    counters = [FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS) for _ in range(3)]
    with dry_run("flops"):
        with counters[0]:
            outputs = forward([layer], received(tensors), targets, model.context, recompute=False)
        with counters[1], model.store.deferring():
            backward(outputs)
        with counters[2]:
            model.store.run_oldest()
    return [counter.get_total_flops() for counter in counters]
