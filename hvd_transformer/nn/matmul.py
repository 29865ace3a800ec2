"""Matrix products in mixed precision: 16-bit operands accumulated in float32, and rows aligned for fast GPU kernels."""

import torch
from torch import Tensor

aten = torch.ops.aten

# GPU matrix kernels read 16 bytes at a time, and are several times slower where rows are not aligned to that. Rows
# aligned to whole cache lines of 128 bytes are fastest.
_ALIGNMENT_BYTES = 128
# Whether this torch writes products of 16-bit operands straight to float32. Otherwise they are rounded to 16 bits,
# written to memory and read again.
_HAS_FLOAT32_OUT = "dtype_out" in aten.addmm.overloads()


def autocast_dtype(values: Tensor) -> torch.dtype | None:
    """The dtype that autocast uses for matrix products on the device of `values`; None if autocast is off."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def _writes_float32(operand: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether products of this 16-bit operand can be written to `out_dtype` without rounding."""
    return _HAS_FLOAT32_OUT and operand.is_cuda and operand.dtype.itemsize == 2 and out_dtype == torch.float32


def matmul(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return `left @ right` in `out_dtype`, which may have more bits than the operands."""
    if _writes_float32(left, out_dtype):
        result: Tensor = aten.mm.dtype(left, right, out_dtype)
        return result
    return (left @ right).to(out_dtype)


def addmm_(out: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Compute `out += left @ right`, or `=` if `first`. The operands may have fewer bits than `out` [N, M]."""
    if out.dtype == left.dtype:
        out.addmm_(left, right, beta=0 if first else 1)
    elif _writes_float32(left, out.dtype):
        aten.addmm.dtype_out(out, left, right, out.dtype, beta=0 if first else 1, out=out)
    elif first:
        out.copy_(left @ right)
    else:
        out.add_(left @ right)


def count_pad_rows(weight: Tensor) -> int:
    """The number of zero rows to append to a weight [V, D] so that the rows of `values @ weight.T` are aligned.

    Aligned products are fast whatever V is: a vocabulary may have any size.
    """
    return -weight.size(0) % (_ALIGNMENT_BYTES // weight.element_size())
