"""Layers whose weight gradients can be had as the two matrices that they are the product of."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.models.shares import Shares

# Called in backward with the layer's input [N, D_in] and the gradient of its output [N, D_out].
TakeProduct = Callable[[Tensor, Tensor], None]


class Product(nn.Module):
    """A layer `values @ weight.T + bias`. While `take_product` is set, weight and bias get no gradient from autograd:
    it gets what that is made of, and can add the product to where gradients are summed, now or when there is time."""

    weight: Tensor
    bias: Any  # a tensor or None
    take_product: TakeProduct | None = None

    @torch.no_grad()
    def add_product(self, values: Tensor, grad: Tensor) -> None:
        """A `take_product` that adds to the gradients that weight and bias have, as autograd does."""
        weight, bias = self.weight.grad, None if self.bias is None else self.bias.grad
        assert weight is not None
        if weight.dtype == grad.dtype:
            weight.addmm_(grad.t(), values)
        else:
            weight.add_(grad.t() @ values)
        if bias is not None:
            bias.add_(grad.sum(0, dtype=bias.dtype))


def out_of_graph(values: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weight and bias, which stay out of the graph, and an anchor: something in it must want a gradient, so that
    backward comes by, and that may be `values` themselves (None)."""
    anchor = None if values.requires_grad else torch.empty(0, requires_grad=True, device=values.device)
    return weight.detach(), None if bias is None else bias.detach(), anchor


class Linear(Product, nn.Linear):
    """`nn.Linear` as such a layer, perhaps cut: `column` where each share has some of the outputs, `row` where it has
    some of the inputs (`models.shares`). A row's bias belongs to the sum."""

    column: Shares | None = None
    row: Shares | None = None

    def forward(self, values: Tensor) -> Tensor:
        """[..., D_in] to [..., D_out]."""
        cut = self.column is not None or self.row is not None
        if (self.take_product is None and not cut) or not torch.is_grad_enabled():
            return _product(values, self.weight, self.bias, self.row)
        weight, bias, anchor = self.weight, self.bias, None
        if self.take_product is not None:
            weight, bias, anchor = out_of_graph(values, weight, bias)
        result: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            values, weight, bias, self.take_product, anchor, self.column, self.row
        )
        return result


def _product(values: Tensor, weight: Tensor, bias: Tensor | None, row: Shares | None) -> Tensor:
    if row is None:
        return F.linear(values, weight, bias)
    result = F.linear(values, weight)
    row.sum_(result)()
    return result if bias is None else result.add_(bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        take: TakeProduct | None,
        anchor: Tensor | None,
        column: Shares | None,
        row: Shares | None,
    ) -> Tensor:
        kind = values.device.type
        if torch.is_autocast_enabled(kind):
            values = values.to(torch.get_autocast_dtype(kind))  # to be kept in this format, as autocast does
        ctx.save_for_backward(values, weight)
        ctx.take, ctx.column, ctx.bias_type = take, column, None if bias is None else bias.dtype
        return _product(values, weight, bias, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Without torch's `once_differentiable`, which costs as much as the rest of this.
        values, weight = ctx.saved_tensors
        grad_values = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        summed = None if grad_values is None or ctx.column is None else ctx.column.sum_(grad_values)
        # Detached: who waits with it would keep the graph that it came from, and what that received.
        values, rows = values.detach().flatten(0, -2), grad.flatten(0, -2)
        grad_weight = grad_bias = None
        if ctx.take is not None:
            ctx.take(values, rows)
        else:
            grad_weight = (rows.t() @ values).to(weight.dtype)
            grad_bias = None if ctx.bias_type is None else rows.sum(0, dtype=ctx.bias_type)
        if summed is not None:
            summed()
        return grad_values, grad_weight, grad_bias, None, None, None, None
