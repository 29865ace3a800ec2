"""Dropout as custom operators of compiled graphs, which read the thread's dropout key when the graph runs.

`Dropout.key`, and the seed that forward passes to backward, are tensors: Python numbers would be constants of the
graph, so that each block and each step would need its own graph.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hvd_transformer.nn.dropout import Dropout, current_seed, seeded_dropout


@torch.library.custom_op("hvd_transformer::dropout", mutates_args=())
def _dropout(values: Tensor, key: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Apply dropout; also returns its seed, for backward."""
    seed = current_seed(*key.tolist())
    return seeded_dropout(values, rate, seed).contiguous(), torch.tensor([seed])


@torch.library.custom_op("hvd_transformer::dropout_backward", mutates_args=())
def _dropout_backward(grad: Tensor, seed: Tensor, rate: float) -> Tensor:
    """Apply the dropout of this seed to the gradient."""
    return seeded_dropout(grad, rate, int(seed)).contiguous()


@_dropout.register_fake
def _(values: Tensor, key: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    return _contiguous_like(values), torch.empty(1, dtype=torch.int64, device="cpu")


@_dropout_backward.register_fake
def _(grad: Tensor, seed: Tensor, rate: float) -> Tensor:
    return _contiguous_like(grad)


def _contiguous_like(values: Tensor) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rate = inputs[2]
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    (seed,) = ctx.saved_tensors
    return _dropout_backward(grad, seed, ctx.rate), None, None


_dropout.register_autograd(_backward, setup_context=_save)


def set_dropout_keys(model: nn.Module) -> None:
    """Prepare the model's dropouts to be compiled. Call after `number_dropouts`."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.key = torch.tensor([module.number, module.shard_index], device="cpu")
