"""Linear and embedding layers that can be tensor parallel, and that pass their weight gradients on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hvd_transformer.nn.contracts import TensorGroup


class VocabShard(NamedTuple):
    """One share's places among all of something, such as rows of a vocabulary."""

    shares: TensorGroup
    places: range
    total: int


def local_vocab_index(numbers: Tensor, places: range) -> tuple[Tensor, Tensor]:
    """Which of these numbers [...] are among the places, and the how manieth of them they are; 0 for the others."""
    inside = (numbers >= places.start) & (numbers < places.stop)
    return inside, (numbers - places.start).masked_fill(~inside, 0)


def reduce_from_tensor_group(values: Tensor, shares: TensorGroup) -> Tensor:
    """The sum over the shares; each one's own values have the sum's gradient."""
    result: Tensor = _Sum.apply(values, shares)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shares: TensorGroup) -> Tensor:
        result = values.clone(memory_format=torch.contiguous_format)
        shares.sum_(result)()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# Called in backward with the layer's input [N, D_in] and the gradient of its output [N, D_out].
TakeProduct = Callable[[Tensor, Tensor], None]


class WeightGradLayer(nn.Module):
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


class Linear(WeightGradLayer, nn.Linear):
    """`nn.Linear` as such a layer, perhaps cut: `column` where each share has some of the outputs, `row` where it has
    some of the inputs (`models.shares`). A row's bias belongs to the sum."""

    column: TensorGroup | None = None
    row: TensorGroup | None = None

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


def _product(values: Tensor, weight: Tensor, bias: Tensor | None, row: TensorGroup | None) -> Tensor:
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
        column: TensorGroup | None,
        row: TensorGroup | None,
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


# Called in backward with the token numbers [N] and the gradient of their vectors [N, D].
TakeRows = Callable[[Tensor, Tensor], None]


class VocabParallelEmbedding(nn.Embedding):
    """`nn.Embedding`; while `take_rows` is set, lookups give their gradient to it, and none to the weight.

    A tied weight's gradient is then complete as soon as the output layer has its part, at the start of backward.
    With `part` its weight has these rows alone, and what `take_rows` gets are places among them.
    """

    take_rows: TakeRows | None = None
    part: VocabShard | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [...] to vectors [..., D]."""
        if self.part is None:
            return self._lookup(tokens)
        inside, rows = local_vocab_index(tokens, self.part.places)
        # Other parts' tokens give zeros to row 0: to leave them out, a GPU would have to tell the host how many remain.
        return reduce_from_tensor_group(self._lookup(rows).masked_fill(~inside[..., None], 0), self.part.shares)

    def _lookup(self, tokens: Tensor) -> Tensor:
        if self.take_rows is None or not torch.is_grad_enabled():
            return nn.functional.embedding(tokens.to(self.weight.device), self.weight).to(tokens.device)
        # Something that wants a gradient, so that backward comes by; the weight itself stays out of the graph.
        anchor = torch.empty(0, requires_grad=True, device=tokens.device)
        weight = self.weight.detach()
        vectors: Tensor = _Lookup.apply(anchor, tokens, weight, self.take_rows)  # type: ignore[no-untyped-call]
        return vectors


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, weight: Tensor, take_rows: TakeRows) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.take_rows = take_rows
        # Tied to an output layer on another device, the matrix stays there and the rows travel.
        return nn.functional.embedding(tokens.to(weight.device), weight).to(tokens.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.take_rows(tokens.flatten(), grad.flatten(0, -2))
        return None, None, None, None
