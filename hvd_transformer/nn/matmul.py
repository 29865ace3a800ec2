"""Matrix products: by the faster of a CPU's two libraries, and in mixed precision with 16-bit operands accumulated in
float32 and rows aligned for fast GPU kernels."""

import os
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_transformer.nn.kernels import Kernels
from hvd_transformer.processor import amd_family, has_instructions

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


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """values [..., D_in] @ weight.T [D_in, D_out] + bias [D_out] + residual [..., D_out] → [..., D_out]."""
    if _uses_onednn(values, weight.size(0)):
        if not (weight.is_contiguous() or weight.t().is_contiguous()):
            weight = weight.contiguous()  # else oneDNN takes a thousand times as long
        result: Tensor = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
        return result if residual is None else result.add_(residual)
    if residual is None:
        return F.linear(values, weight, bias)
    fits = residual.is_contiguous() and values.dtype == weight.dtype == residual.dtype
    if bias is None or not fits or torch.is_grad_enabled() or autocast_dtype(values) is not None:
        return F.linear(values, weight, bias) + residual
    total = residual + bias  # the product is added, as torch adds it to the bias
    total.flatten(0, -2).addmm_(values.flatten(0, -2), weight.t())
    return total


def matmul(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """left [..., K] @ right [K, M] in `out_dtype`, which may have more bits than the operands; None: in theirs."""
    if out_dtype is not None and _writes_float32(left, out_dtype):
        result: Tensor = aten.mm.dtype(left, right, out_dtype)
        return result
    product = linear(left, right.t())
    return product if out_dtype is None else product.to(out_dtype)


def weight_grad_(out: Tensor, grad: Tensor, values: Tensor, *, first: bool, kernels: Kernels | None = None) -> None:
    """Compute `out += grad.T @ values`, or `=` if `first`: a weight's gradient [D_out, D_in] from the gradient of its
    layer's output [N, D_out] and the layer's input [N, D_in], which may have fewer bits than `out`.

    `kernels` are used where they are faster than the libraries.
    """
    if out.dtype != grad.dtype:
        if _writes_float32(grad, out.dtype):
            aten.addmm.dtype_out(out, grad.t(), values, out.dtype, beta=0 if first else 1, out=out)
        elif first:
            out.copy_(matmul(grad.t(), values))
        else:
            out.add_(matmul(grad.t(), values))
    elif kernels is not None and _uses_kernels(out, grad, values, kernels):
        kernels.weight_grad_(out, grad, values, first=first)
    elif _uses_onednn(grad.t(), values.size(1), into_sum=True):
        rows = max(1, _MOST_TEMPORARY // values.size(1))  # oneDNN cannot write to `out`
        # Copied at once: rows are far apart in the transpose of a gradient.
        for part, own in zip(out.split(rows), grad.t().contiguous().split(rows), strict=True):
            product = linear(own, values.t())
            if first:
                part.copy_(product)
            else:
                part.add_(product)
    else:
        out.addmm_(grad.t(), values, beta=0 if first else 1)


# Smaller and narrower products take longer in oneDNN, which looks up the kernel for their shape.
_LEAST_SIDE, _LEAST_MULTIPLICATIONS = 16, 1 << 20
_MOST_TEMPORARY = 1 << 20  # values of a product that is then added to a sum: 4 MiB


def _uses_onednn(left: Tensor, columns: int, *, into_sum: bool = False) -> bool:
    """Whether oneDNN multiplies left [..., K] and a matrix [K, `columns`]: large float32 matrices on a CPU where it is
    faster, outside of what autograd and autocast record. `into_sum`: the product is added to a sum."""
    if torch.is_grad_enabled() or left.dtype != torch.float32 or not left.is_cpu:
        return False  # first, as torch.compile cannot trace what asks for the CPU
    if not _onednn_is_faster(into_sum) or torch.is_autocast_enabled("cpu"):
        return False
    count, depth = left.numel(), left.size(-1)
    return (
        count * columns >= _LEAST_MULTIPLICATIONS
        and min(depth, columns, count // depth) >= _LEAST_SIDE
        # torch's own switch: `torch.backends.mkldnn.flags(enabled=False)`.
        and torch._C._get_mkldnn_enabled()
        # What counts FLOPs or memory knows torch's operators.
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _uses_kernels(out: Tensor, grad: Tensor, values: Tensor, kernels: Kernels) -> bool:
    """Whether `kernels` multiply grad.T [D_out, N] and values [N, D_in], for a sum `out`."""
    return (
        _kernels_are_faster()
        and grad.numel() * values.size(1) >= _LEAST_MULTIPLICATIONS
        and kernels.fit(out, grad, values)
        and torch._C._len_torch_dispatch_stack() == 0
    )


_ZEN_4, _ZEN_5 = 25, 26  # the families: Zen 3 is of Zen 4's, without AVX-512


@cache
def _kernels_are_faster() -> bool:
    """Whether `nn.kernels` multiply for weight gradients faster than both libraries: on Zen 4, by 1.01 to 1.33."""
    return amd_family() == _ZEN_4 and has_instructions("avx512f")


@cache
def _onednn_is_faster(into_sum: bool) -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which torch calls: on AMD CPUs with AVX-512, which
    MKL does not use there.

    Zen 4 computes 512 bits in two halves. It gains less, and loses that where products are added to a sum: MKL writes
    to the sum itself, and reads a transposed gradient as it is.
    """
    family = amd_family()
    if family is None or not has_instructions("avx512f") or (into_sum and family < _ZEN_5):
        return False
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


# oneDNN and torch's layer around it each cache what they prepare for the shapes of a product, up to 1,024 of them. That
# takes gigabytes where the number of tokens varies; one step has far fewer shapes than these.
_CACHED_SHAPES = 64


def limit_onednn_caches() -> None:
    """Keep the caches of oneDNN small, unless the user has set their size. Call before the first product."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_CACHED_SHAPES))


def count_pad_rows(weight: Tensor) -> int:
    """The number of zero rows to append to a weight [V, D] so that the rows of `values @ weight.T` are aligned.

    Aligned products are fast whatever V is: a vocabulary may have any size.
    """
    return -weight.size(0) % (_ALIGNMENT_BYTES // weight.element_size())
