"""Muon: momentum whose direction is orthogonalised, matrix by matrix.

    gradient → momentum → Nesterov's direction → orthogonal, × 0.2 √max(rows, columns) → weights

Jordan et al. 2024, kellerjordan.github.io/posts/muon. Each step changes all singular directions of a weight by about as
much. The factor gives an update the root mean square that AdamW's usually has, so that one learning rate and one weight
decay suit both (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2). It is for the
matrices of hidden layers; AdamW updates the others.
"""

from collections.abc import Iterable, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from hvd_transformer.gradients.shared_matrices import SharedMatrices
from hvd_transformer.nn.matmul import matmul

MOMENTUM = 0.95
# Newton-Schulz: x → a x + b x³ + c x⁵ in a few steps. These are Polar Express (Amsel et al. 2025, arXiv 2505.16932,
# algorithm 1) for singular values from 0.01 to 1, which come to 0.73 to 1.27.
STEPS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
_MARGIN = 1.01  # keeps rounded singular values below 1: the first step's polynomial grows fast beyond
_EPSILON = 1e-7  # of a matrix that is zero


def hidden_matrices(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The matrices of hidden layers, given a model's modules in order.

    Embeddings are none, nor are biases, nor is the output layer: the last matrix of all, the embedding itself if it is
    tied.
    """
    modules = list(modules)
    embeddings = {
        id(inner.weight) for module in modules for inner in module.modules() if isinstance(inner, nn.Embedding)
    }
    named = [pair for module in modules for pair in module.named_parameters(remove_duplicate=False)]
    matrices = [weight for _, weight in named if weight.ndim == 2]
    biases = {id(weight) for name, weight in named if name.endswith("bias")}  # Marian's has the shape [1, V]
    others = embeddings | biases | {id(weight) for weight in matrices[-1:]}
    return list({id(weight): weight for weight in matrices if id(weight) not in others}.values())


def orthogonalise_cost(shape: tuple[int, int]) -> float:
    """The multiplications that `orthogonalise` takes."""
    small, large = sorted(shape)
    if large < 2 * small:
        return len(STEPS) * small**2 * (2 * large + small)
    return small**2 * (2 * large + (4 * len(STEPS) - 3) * small)


def orthogonalise(matrix: Tensor) -> Tensor:
    """U Vᵀ of the matrix's singular value decomposition U S Vᵀ, nearly.

    Singular values become 0.7 to 1.3, those below a hundredth of the largest less. In the matrix's number format; on
    a GPU float32 in bfloat16.
    """
    in_half = matrix.is_cuda and matrix.dtype == torch.float32
    values = matrix.bfloat16() if in_half else matrix
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        values = values.t()
    small, large = values.shape
    norm, gram, square = _normalised(matmul(values, values.t()))
    first = _polynomial(gram, square, 0)
    if large >= 2 * small and not in_half:
        values = matmul(_factor(first, gram).div_(norm), values)
    else:
        values = matmul(first.div_(norm), values)
        for step in range(1, len(STEPS)):
            gram = matmul(values, values.t())
            values = matmul(_polynomial(gram, matmul(gram, gram), step), values)
    result: Tensor = values.t() if is_tall else values
    return result.to(matrix.dtype)


def _normalised(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A bound on the largest singular value of x, given x xᵀ; x xᵀ of x over the bound, and the square of that.

    The bound is the eighth root of the sum of σ⁸ (Gelfand's formula, Grishina et al. 2025, arXiv 2506.10935): near the
    largest σ, where the Frobenius norm may be ten times that. It saves a step, and its products are needed anyway.
    """
    trace = gram.diagonal().sum().clamp_(min=_EPSILON**2)  # torch 2.11 has no trace of bfloat16 on CPUs
    gram = gram / trace  # σ⁸ itself may be too small a number
    square = matmul(gram, gram)
    bound = torch.linalg.vector_norm(square).sqrt_().mul_(_MARGIN**2).clamp_(min=_EPSILON)
    return (trace * bound).sqrt_(), gram.div_(bound), square.div_(bound.square())


def _polynomial(gram: Tensor, square: Tensor, step: int) -> Tensor:
    """What a step multiplies x by, given x xᵀ and its square."""
    a, b, c = STEPS[step]
    result = (gram * b).add_(square, alpha=c)
    result.diagonal().add_(a)
    return result


def _factor(first: Tensor, gram: Tensor) -> Tensor:
    """What all steps together multiply x by, given x xᵀ and what the first step multiplies by.

    They are products on the short side alone: half of the work where x is four times as wide as high. bfloat16 is too
    coarse for it.
    """
    factor = last = first
    for step in range(1, len(STEPS)):
        gram = matmul(matmul(last, gram), last)
        last = _polynomial(gram, matmul(gram, gram), step)
        factor = matmul(last, factor)
    return factor


def _update(direction: Tensor) -> Tensor:
    return orthogonalise(direction) * (0.2 * sqrt(max(direction.shape)))


class Muon:
    """Updates the buffers of `matrices`. `momenta` are flat tensors like the buffers' own parameters."""

    def __init__(self, matrices: SharedMatrices, momenta: Sequence[Tensor], weight_decay: float) -> None:
        self._matrices, self._weight_decay = matrices, weight_decay
        self._pairs = list(zip(matrices.buffers, momenta, strict=True))

    def step(self, learning_rate: float, factor: float = 1.0) -> None:
        """One update at this learning rate with the gradients × `factor`; leaves other values there. Collective."""
        for buffer, momentum in self._pairs:
            gradients = buffer.own_gradients.mul_(factor) if factor != 1.0 else buffer.own_gradients
            momentum.lerp_(gradients, 1 - MOMENTUM)
            gradients.lerp_(momentum, MOMENTUM)
        self._matrices.apply_(_update)
        for buffer, _ in self._pairs:
            buffer.own_parameters.mul_(1 - learning_rate * self._weight_decay)
            buffer.own_parameters.add_(buffer.own_gradients, alpha=-learning_rate)
