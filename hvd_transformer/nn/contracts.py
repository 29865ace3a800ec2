"""The interfaces between layers, pipeline and gradient engine."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from hvd_transformer.nn.kernels import Kernels

Tensors = tuple[Tensor, ...]


class Layer(NamedTuple):
    """One layer of a model. `run` takes the output of the previous layer and returns its own: a tensor or a tuple."""

    name: str
    module: nn.Module  # whose parameters `run` uses
    run: Callable[..., Tensor | Tensors]
    recompute: bool = True  # whether recomputing it in backward saves memory


class MicroBatch(NamedTuple):
    """`inputs` go to the first layer; the last layer takes `targets` after the output tensors of the previous layer.

    `dropout_key` identifies the samples in the job: see `nn.dropout.dropout_key`.
    """

    inputs: Tensors
    targets: Tensors
    dropout_key: tuple[int, ...] = ()


class TensorSplit(NamedTuple):
    """A weight is split along `dim` into one piece per rank of the tensor group.

    A weight that stacks several matrices along `dim` splits each of these `parts`.
    """

    dim: int
    parts: int = 1


class TensorGroup(Protocol):
    """The ranks that share one split layer, each with a piece of its weights."""

    index: int  # this rank's piece, from 0
    count: int  # the number of pieces

    def sum_(self, values: Tensor) -> Callable[[], object]:
        """Start the in-place sum of a contiguous tensor over the group; the function returned waits for it."""

    def gather(self, values: Tensor) -> Tensor:
        """Stack every rank's tensor of this shape [...], in rank order: [count, ...]."""


class WeightGrads(Protocol):
    """Receives the weight gradient of one linear layer as two matrices, whose product it is."""

    def put(self, values: Tensor, grad: Tensor, kernels: Kernels | None) -> None:
        """Called in backward with a layer's input [N, D_in], the gradient of its output [N, D_out], and its kernels."""

    def put_formed(self, weight_grad: Tensor, bias_grad: Tensor | None, factor: Tensor) -> None:
        """Called in backward with computed gradients in the shapes of weight and bias, which are still to be multiplied
        by the scalar `factor`."""


class EmbeddingGrads(Protocol):
    """Receives the gradient of embedding lookups as rows, one per token."""

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        """Called in backward with the token numbers [N] and the gradient of their vectors [N, D]."""
