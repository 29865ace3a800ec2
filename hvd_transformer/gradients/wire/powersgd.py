"""PowerSGD: the gradients of matrices travel as two factors of low rank (Vogels et al. 2019, arXiv 1905.13727).

    M [n, m] = gradient + error         P = M Q            summed over the ranks, orthogonalised: P̂
                                        Q = Mᵀ P̂           summed over the ranks; the next step begins with it
                                        M̂ = P̂ Qᵀ           the sum that all ranks receive; error = M − M̂ / ranks

It is a step of power iteration, which over the steps finds the largest singular vectors. A buffer's P of all matrices
is one message, sent while backward goes on, and with it travel the values that are no matrix or too small a one. Its Q
is a second one, behind the last buffer. The first tenth of all steps travels as it is: gradients change fast there
(torch's `PowerSGDState.start_powerSGD_iter` is for the same).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import ParamSlot
from hvd_transformer.gradients.wire.feedback import ERROR, FeedbackWire
from hvd_transformer.gradients.wire.plain import InTransit, Layout, WireOptions

PLAIN_PART = 0.1  # of all steps
LEAST_GAIN = 2  # factors are sent where they have so many times fewer numbers than the matrix
FACTOR = "factor."


def num_values(shape: torch.Size, rank: int) -> int:
    """The numbers as which a parameter of this shape travels, over both messages."""
    if len(shape) < 2:
        return shape.numel()
    rows, columns = shape[0], shape[1:].numel()
    factors = rank * (rows + columns)
    return factors if factors * LEAST_GAIN <= rows * columns else shape.numel()


class _Matrix(NamedTuple):
    """A matrix [n, m] in a buffer, and the factor Q [m, rank] with which its next step begins, equal on all ranks."""

    slot: ParamSlot
    factor: Tensor

    def of(self, flat: Tensor) -> Tensor:
        return self.slot.view(flat).view(-1, len(self.factor))


class PowerSgdWire(FeedbackWire):
    """Factors of rank `options.powersgd_rank` for large matrices; it reduces whole gradients only, not to shards."""

    format = "powersgd"

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        rank = self.options.powersgd_rank
        self._matrices = {
            name: [
                _Matrix(slot, layout.values.new_empty(slot.parameter[0].numel(), rank))
                for slot in layout.slots
                if num_values(slot.parameter.shape, rank) < slot.parameter.numel()
            ]
            for name, layout in self.layouts.items()
        }
        self._plain = False
        self._draw_factors()

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        super().begin_step(step, total_steps, scale)
        self._plain = step < PLAIN_PART * total_steps

    def all_reduce_async(self, gradients: Tensor, name: str) -> InTransit:
        matrices = self._matrices[name]
        if self._plain or not matrices:
            return super().all_reduce_async(gradients, name)
        gradients.add_(self.errors[name])  # zero outside of the matrices
        products = [matrix.of(gradients) @ _orthonormal(matrix.factor) for matrix in matrices]
        rest = _rest(gradients, matrices)
        first = torch.cat([*(product.flatten() for product in products), *rest])
        wait = self.group.all_reduce_async_(first, f"{name}.p")
        second = self._when_sent(lambda: self._second_factors(gradients, name, wait()))
        length = first.numel() + sum(matrix.factor.numel() for matrix in matrices)
        return InTransit(length * gradients.itemsize, lambda: self._decode(gradients, name, *second()))

    def skip_step(self) -> None:
        super().skip_step()
        self._draw_factors()

    def tensors(self) -> dict[str, Tensor]:
        factors = {matrix.slot.name: matrix.factor for matrices in self._matrices.values() for matrix in matrices}
        errors = {name: error for name, error in super().tensors().items() if name.removeprefix(ERROR) in factors}
        return errors | {FACTOR + name: factor.view(-1) for name, factor in factors.items()}

    def _second_factors(
        self, gradients: Tensor, name: str, first: Tensor
    ) -> tuple[Sequence[Tensor], Callable[[], Tensor]]:
        """P̂ of each matrix, from the sums of P, and the function that waits for the sums of Q."""
        matrices, rank = self._matrices[name], self.options.powersgd_rank
        sizes = [matrix.of(gradients).size(0) * rank for matrix in matrices]
        rest = _rest(gradients, matrices)
        *products, others = first.split([*sizes, first.numel() - sum(sizes)])
        for values, received in zip(rest, others.split([values.numel() for values in rest]), strict=True):
            values.copy_(received)
        bases = [_orthonormal(product.view(-1, rank)) for product in products]
        factors = [(matrix.of(gradients).t() @ basis).flatten() for matrix, basis in zip(matrices, bases, strict=True)]
        return bases, self.group.all_reduce_async_(torch.cat(factors), f"{name}.q")

    def _decode(self, gradients: Tensor, name: str, bases: Sequence[Tensor], wait: Callable[[], Tensor]) -> Tensor:
        """Overwrite the gradients with their sum; what it lacks of this rank's part becomes the error."""
        matrices, error = self._matrices[name], self.errors[name]
        factors = wait().split([matrix.factor.numel() for matrix in matrices])
        for matrix, basis, factor in zip(matrices, bases, factors, strict=True):
            matrix.factor.copy_(factor.view_as(matrix.factor))
            whole, columns = matrix.of(gradients), matrix.factor.t()
            torch.addmm(whole, basis, columns, alpha=-1 / self.group.size, out=matrix.of(error))
            torch.mm(basis, columns, out=whole)
        return gradients

    def _draw_factors(self) -> None:
        """Random factors, equal on all ranks."""
        for matrices in self._matrices.values():
            for matrix in matrices:
                generator = torch.Generator().manual_seed(self.options.seed)
                matrix.factor.copy_(torch.randn(matrix.factor.shape, generator=generator))


def _orthonormal(factor: Tensor) -> Tensor:
    """Orthonormal columns with the same span; some columns, where the factor is zero."""
    basis: Tensor = torch.linalg.qr(factor).Q
    return basis


def _rest(gradients: Tensor, matrices: Sequence[_Matrix]) -> list[Tensor]:
    """The parts of a buffer around the matrices: views."""
    starts = [0, *(matrix.slot.stop for matrix in matrices)]
    stops = [*(matrix.slot.start for matrix in matrices), gradients.numel()]
    return [gradients[start:stop] for start, stop in zip(starts, stops, strict=True)]
