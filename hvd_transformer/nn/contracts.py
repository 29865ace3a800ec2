"""What layers, pipeline and gradient engine know of each other: layers, micro-batches, tensor splits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class TensorSplit(NamedTuple):
    """A weight is cut along `dim` into one piece a share; where it stacks several matrices, each of these `parts`."""

    dim: int
    parts: int = 1


class TensorGroup(Protocol):
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


Tensors = tuple[Tensor, ...]


class Layer(NamedTuple):
    """One layer: `run` takes the tensors of the layer before it and returns its own (one, or a tuple)."""

    name: str
    module: nn.Module  # whose parameters it uses
    run: Callable[..., Tensor | Tensors]
    recompute: bool = True  # whether computing it again in backward saves anything


class Stage(NamedTuple):
    """Neighbouring layers on one device."""

    layers: Sequence[Layer]
    device: torch.device


class MicroBatch(NamedTuple):
    """What the first layer takes, and what the last takes beside the tensors of the one before it."""

    inputs: Tensors
    targets: Tensors
