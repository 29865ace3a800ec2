"""How a model may be cut for ranks that share its matrices, as plain data, and what a layer so cut asks of them.

    values -> [ column: a share of the outputs ] -> [ row: a share of the inputs ] -> sum over the shares

Between the two each share works alone: one sum forward, after the row, and one backward, of the gradient of the
column's input (Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Cut(NamedTuple):
    """A weight is cut along `dim` into one piece a share; where it stacks several matrices, each of these `parts`."""

    dim: int
    parts: int = 1


class Shares(Protocol):
    """The ranks that hold the other shares, as one cut layer sees them."""

    @property
    def index(self) -> int:
        """Which share this is."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def sum_(self, values: Tensor) -> Callable[[], None]:
        """Begins the sum of a contiguous tensor over the shares, in place; returns the function that waits for it."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Every share's tensor of this shape [...], in order: [count, ...]."""
        ...


class Part(NamedTuple):
    """One share's places among all of something, such as rows of a vocabulary."""

    shares: Shares
    places: range
    total: int


def own_places(numbers: Tensor, places: range) -> tuple[Tensor, Tensor]:
    """Which of these numbers [...] are among the places, and the how manieth of them they are; 0 for the others."""
    inside = (numbers >= places.start) & (numbers < places.stop)
    return inside, (numbers - places.start).masked_fill(~inside, 0)


def summed(values: Tensor, shares: Shares) -> Tensor:
    """The sum over the shares; each one's own values have the sum's gradient."""
    result: Tensor = _Sum.apply(values, shares)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shares: Shares) -> Tensor:
        result = values.clone(memory_format=torch.contiguous_format)
        shares.sum_(result)()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
