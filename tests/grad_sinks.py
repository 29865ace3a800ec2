"""Where layers under test leave the gradients of their weights, in place of the gradient engine."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.planning.layer_profile import ParameterGrads


class Sink:
    """`WeightGrads` and `EmbeddingGrads` that call a function."""

    def __init__(self, function: Callable[[Tensor, Any], object]) -> None:
        self.function = function

    def put(self, first: Tensor, second: Tensor, kernels: object = None) -> None:
        self.function(first, second)

    def put_formed(self, weight_grad: Tensor, bias_grad: Tensor | None, factor: Tensor) -> None:
        self.function(weight_grad * factor, None if bias_grad is None else bias_grad * factor)


def parameter_grads(layer: WeightGradLayer, store: WeightGradStore | None = None) -> ParameterGrads:
    """Multiplies right into the gradients of weight and bias: rounded once, where autograd rounds product and sum."""
    for weight in layer.parameters(recurse=False):
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad

    return ParameterGrads(layer, store or WeightGradStore())
