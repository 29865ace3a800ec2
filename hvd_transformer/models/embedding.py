"""A token embedding whose gradient can be had as rows, one a token, in place of a matrix that is mostly zero."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hvd_transformer.models.shares import Part, own_places, summed

# Called in backward with the token numbers [N] and the gradient of their vectors [N, D].
TakeRows = Callable[[Tensor, Tensor], None]


class Embedding(nn.Embedding):
    """`nn.Embedding`; while `take_rows` is set, lookups give their gradient to it, and none to the weight.

    A tied weight's gradient is then complete as soon as the output layer has its part, at the start of backward.
    With `part` its weight has these rows alone, and what `take_rows` gets are places among them.
    """

    take_rows: TakeRows | None = None
    part: Part | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [...] to vectors [..., D]."""
        if self.part is None:
            return self._lookup(tokens)
        inside, rows = own_places(tokens, self.part.places)
        # Other parts' tokens give zeros to row 0: to leave them out, a GPU would have to tell the host how many remain.
        return summed(self._lookup(rows).masked_fill(~inside[..., None], 0), self.part.shares)

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
