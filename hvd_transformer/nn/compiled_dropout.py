"""Dropout as operators of compiled graphs: what they read of a thread's place is not part of the graph.

`Dropout.key` travels as a tensor, and the seed from forward to backward: numbers would be constants of the graph, so
that each block and each step would need one of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hvd_transformer.nn.dropout import Dropout, dropped, seed_here


@torch.library.custom_op("hvd_transformer::dropout", mutates_args=())
def _dropout(values: Tensor, key: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The values after dropout, and its seed."""
    seed = seed_here(*key.tolist())
    return dropped(values, rate, seed).contiguous(), torch.tensor([seed])


@torch.library.custom_op("hvd_transformer::dropout_again", mutates_args=())
def _dropout_again(values: Tensor, seed: Tensor, rate: float) -> Tensor:
    """The values after the dropout of this seed."""
    return dropped(values, rate, int(seed)).contiguous()


@_dropout.register_fake
def _(values: Tensor, key: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    return _like(values), torch.empty(1, dtype=torch.int64, device="cpu")


@_dropout_again.register_fake
def _(values: Tensor, seed: Tensor, rate: float) -> Tensor:
    return _like(values)


def _like(values: Tensor) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rate = inputs[2]
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    (seed,) = ctx.saved_tensors
    return _dropout_again(grad, seed, ctx.rate), None, None


_dropout.register_autograd(_backward, setup_context=_save)


def give_keys(model: nn.Module) -> None:
    """Make the model's dropouts ready to be compiled."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.key = torch.tensor([module.number, module.share], device="cpu")
