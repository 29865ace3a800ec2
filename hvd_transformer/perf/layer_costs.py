"""What each layer computes and keeps for one micro-batch, found by running it on fake tensors.

They have shapes, number formats and a device, but no memory and no values: a model of any size costs nothing, and
what runs are the CPU's own kernels and autocast. torch's bare meta device would do attention by other kernels, which
keep all its weights [B, H, T, T], and knows no autocast.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hvd_transformer.config.schema import Config
from hvd_transformer.models.dropout import dropout_place
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.parallel.pipeline import Layer, Tensors
from hvd_transformer.training.language_model_task import language_model_layers
from hvd_transformer.training.precision import autocast, weight_dtype

# Bytes by storage: tensors that share one are counted once, also over several layers.
Storages = Mapping[int, int]

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
class LayerCost:
    """One layer's weights, and its part in one micro-batch."""

    name: str
    parameters: int  # those of a tied weight at its last layer
    weight_bytes: int
    forward_flops: int
    backward_flops: int
    inputs: Storages
    outputs: Storages
    saved: Storages  # what autograd keeps of this micro-batch, weights not among it
    recompute: bool  # whether `parallel.recompute` means this layer

    @property
    def activation_bytes(self) -> int:
        """Its input, and what it keeps."""
        return size(self.inputs, self.saved)


def size(*parts: Storages) -> int:
    """Bytes of all parts together, a storage in several of them counted once."""
    return sum({storage: bytes_ for part in parts for storage, bytes_ in part.items()}.values())


def layer_costs(config: Config, vocab_size: int, num_samples: int) -> list[LayerCost]:
    """The language model's layers, each run forward and backward for `num_samples` samples."""
    with FakeTensorMode(), _default_dtype(weight_dtype(config.training.precision)):
        model = LanguageModel(vocab_size, config.model).train()
        tokens = torch.zeros(num_samples, config.data.sequence_length, dtype=torch.int64)
        return costs_of(language_model_layers(model), (tokens,), (tokens.clone(),), config)


def costs_of(layers: Sequence[Layer], inputs: Tensors, targets: Tensors, config: Config) -> list[LayerCost]:
    """The same of any layers on the CPU, fake or real."""
    owner = {id(weight): layer.name for layer in layers for weight in layer.module.parameters()}
    tensors, costs = inputs, []
    alive: list[Tensor] = []  # a storage's number is its own only as long as it lives
    for layer in layers:
        if layer is layers[-1]:
            tensors += targets
        # What a second run keeps once more, weights and tables of positions, is not the micro-batch's own.
        lasting = {_storage(tensor) for tensor in _run(layer, tensors, config, alive)[1]}
        lasting &= {_storage(tensor) for tensor in _run(layer, tensors, config, alive)[1]}
        lasting -= {_storage(tensor) for tensor in tensors}
        with FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS) as counter:
            outputs, saved = _run(layer, tensors, config, alive)
            forward_flops = counter.get_total_flops()
            wanting: list[Tensor] = [tensor for tensor in outputs if tensor.requires_grad]
            torch.autograd.backward(wanting, [torch.ones_like(tensor) for tensor in wanting])
            backward_flops = counter.get_total_flops() - forward_flops
        own = [weight for weight in layer.module.parameters() if owner[id(weight)] == layer.name]
        for weight in layer.module.parameters():
            weight.grad = None
        costs.append(
            LayerCost(
                name=layer.name,
                parameters=sum(weight.numel() for weight in own),
                weight_bytes=sum(weight.numel() * weight.element_size() for weight in own),
                forward_flops=forward_flops,
                backward_flops=backward_flops,
                inputs=_bytes(tensors),
                outputs=_bytes(outputs),
                saved=_bytes(tensor for tensor in saved if _storage(tensor) not in lasting),
                recompute=layer.recompute,
            )
        )
        tensors = outputs
    return costs


def _run(layer: Layer, tensors: Tensors, config: Config, alive: list[Tensor]) -> tuple[Tensors, list[Tensor]]:
    """One forward, as the pipeline does it: (outputs, what autograd keeps)."""
    inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    place = autocast(config.training.precision, torch.device("cpu"))
    with saved_tensors_hooks(keep, lambda tensor: tensor), place, dropout_place(0):
        result = layer.run(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    alive += [*saved, *outputs]
    return outputs, saved


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: Iterable[Tensor]) -> Storages:
    return {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
