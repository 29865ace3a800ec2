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

MOMENTUM = 0.95
# Newton-Schulz: x → a x + b x³ + c x⁵ brings singular values near 1 in this number of steps, from about 1e-3 on.
STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315
_EPSILON = 1e-7  # of a matrix that is zero


def hidden_matrices(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The matrices of hidden layers, given a model's modules in order.

    Embeddings are none, neither is the output layer: the last matrix of all, the embedding itself if it is tied.
    """
    modules = list(modules)
    embeddings = {
        id(inner.weight) for module in modules for inner in module.modules() if isinstance(inner, nn.Embedding)
    }
    named = [pair for module in modules for pair in module.named_parameters(remove_duplicate=False)]
    matrices = [weight for _, weight in named if weight.ndim == 2]
    others = embeddings | {id(weight) for weight in matrices[-1:]}
    return list({id(weight): weight for weight in matrices if id(weight) not in others}.values())


def orthogonalise_cost(shape: tuple[int, int]) -> float:
    """The multiplications that `orthogonalise` takes."""
    small, large = sorted(shape)
    if large < 2 * small:
        return STEPS * small**2 * (2 * large + small)
    return small**2 * (2 * large + (4 * STEPS - 3) * small)


def orthogonalise(matrix: Tensor) -> Tensor:
    """U Vᵀ of the matrix's singular value decomposition U S Vᵀ, nearly: its singular values are 0.7 to 1.2.

    In float32 or more on a CPU, in bfloat16 on a GPU.
    """
    values = matrix.bfloat16() if matrix.is_cuda else matrix
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        values = values.t()
    values = values / torch.linalg.vector_norm(values).clamp(min=_EPSILON)
    small, large = values.shape
    if large >= 2 * small and not matrix.is_cuda:
        values = _newton_schulz_factor(values @ values.t()) @ values
    else:
        for _ in range(STEPS):
            values = _polynomial(values @ values.t()) @ values
    result: Tensor = values.t() if is_tall else values
    return result.to(matrix.dtype)


def _polynomial(gram: Tensor) -> Tensor:
    """What one step multiplies x by, given x xᵀ."""
    result = torch.addmm(gram, gram, gram, beta=B, alpha=C)
    result.diagonal().add_(A)
    return result


def _newton_schulz_factor(gram: Tensor) -> Tensor:
    """What all steps together multiply x by, given x xᵀ.

    They are products on the short side alone: half of the work where x is four times as wide as high. bfloat16 is too
    coarse for it.
    """
    factor = _polynomial(gram)
    last = factor
    for _ in range(STEPS - 1):
        gram = last @ gram @ last
        last = _polynomial(gram)
        factor = last @ factor
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
