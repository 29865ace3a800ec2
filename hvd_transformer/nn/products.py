"""Matrix products of 16-bit numbers on a GPU: added up in float32, with rows that its fast kernels take."""

import torch
from torch import Tensor

aten = torch.ops.aten

# Matrix kernels read 16 bytes at a time, and are several times slower where rows begin elsewhere; whole lines of 128
# bytes are best.
_ROW_BYTES = 128
# Whether this torch adds products of 16-bit factors straight to float32. Without, they are rounded, written and read.
_ADDS_WIDE = "dtype_out" in aten.addmm.overloads()


def autocast_dtype(values: Tensor) -> torch.dtype | None:
    """The number format of products with these values where autocast is on; None: theirs."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def _adds_wide(left: Tensor, wide: torch.dtype) -> bool:
    return _ADDS_WIDE and left.is_cuda and left.dtype.itemsize == 2 and wide == torch.float32


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left @ right` in this number format, which may have more bits than the factors."""
    if _adds_wide(left, dtype):
        result: Tensor = aten.mm.dtype(left, right, dtype)
        return result
    return (left @ right).to(dtype)


def add_product_(target: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """`target += left @ right`, or `=` if `first`. The factors may have fewer bits than the target [N, M]."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, beta=0 if first else 1)
    elif _adds_wide(left, target.dtype):
        aten.addmm.dtype_out(target, left, right, target.dtype, beta=0 if first else 1, out=target)
    elif first:
        target.copy_(left @ right)
    else:
        target.add_(left @ right)


def zeros_beside(weight: Tensor) -> int:
    """The rows of zeros to add to a weight [M, D], so that `values @ weight.T` has rows of whole lines of memory.

    Products with those are fast whatever M is: a vocabulary may have any size.
    """
    return -weight.size(0) % (_ROW_BYTES // weight.element_size())
