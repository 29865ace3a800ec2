"""Fused parts of a training step on a CPU: dropout + residual, GELU + dropout, attention, and the loss.

They stand where autograd expects operations, between the matrix products. So everything that hangs on the products
stays as it is: weight-gradient stores, sums of a tensor group, recomputation, stages in threads. The calls run without
Python's global lock. Results are those of torch's operations, up to rounding; dropout keeps the same values.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_F, _I, _N, _P = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "random_bits": [_P, _P, _N],
    "dropout": [_P, _P, _P, _P, _N, _I, _F],
    "gelu": [_P, _P, _P, _P, _N, _I, _F],
    "attention_forward": [_P] * 9,
    "attention_backward": [_P] * 13,
    "cross_entropy": [_P, _P, _P, _N, _N, _F],
}


class DropoutBits(NamedTuple):
    """16 random bits per value: one whose `bits` are less than `least` is dropped, the others grow by `scale`."""

    bits: Tensor  # int16
    least: int
    scale: float


def dropout_threshold(rate: float) -> tuple[int, float]:
    """`least` and `scale` of `DropoutBits`: the dropped share is rounded to 65,536ths, and the scale is exactly that
    share's."""
    dropped = min(round(rate * 2**16), 2**16 - 1)
    return dropped - 2**15, 2**16 / (2**16 - dropped)


_NONE = (None, 0, 1.0)  # instead of `DropoutBits`, where nothing is dropped


class Kernels:
    """The functions of the compiled library. Tensors that `fit` only."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
        self.library = library

    @staticmethod
    def fit(*tensors: Tensor | None, rows: bool = False) -> bool:
        """Whether these are what the kernels take: float32 on the CPU, contiguous; `rows`: if only each row is."""
        return all(
            tensor.dtype == torch.float32
            and tensor.device.type == "cpu"
            and (tensor.stride(-1) == 1 if rows else tensor.is_contiguous())
            for tensor in tensors
            if tensor is not None
        )

    def draw(self, shape: Sequence[int], rate: float, seed: int) -> DropoutBits:
        """Random bits for values of this shape: those of numpy's SFC64 with the seed."""
        count = torch.Size(shape).numel()
        state = np.random.SFC64(seed).state["state"]["state"]
        bits = torch.empty(-(-count // 4), dtype=torch.int64)
        self.library.random_bits(state.ctypes.data, bits.data_ptr(), bits.numel())
        return DropoutBits(bits.view(torch.int16)[:count].view(shape), *dropout_threshold(rate))

    def dropout(self, values: Tensor, drawn: DropoutBits, residual: Tensor | None = None) -> Tensor:
        """`values` after dropout, plus `residual`; all of one shape."""
        result: Tensor = _Dropout.apply(self.library, values, residual, *drawn)  # type: ignore[no-untyped-call]
        return result

    def gelu(self, values: Tensor, drawn: DropoutBits | None) -> Tensor:
        """GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415), then dropout."""
        trains = torch.is_grad_enabled() and values.requires_grad
        result: Tensor = _Gelu.apply(self.library, values, trains, *(drawn or _NONE))  # type: ignore[no-untyped-call]
        return result

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        allowed: Tensor | None,
        drawn: DropoutBits | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Scaled dot-product attention with queries [B, H, T, D/H] over keys and values [B, H, S, D/H]: [B, T, H, D/H].

        `allowed` [B, S] marks the keys to attend to. If `causal`, the queries are the last T of the S positions.
        `starts` [B, T] is the first key that each query attends to and must not decrease; earlier keys cost no time.
        Dropout of the weights has bits [B, H, T, S]. The weights never exist as a whole (FlashAttention, Dao et al.
        2022, arXiv 2205.14135); rows of queries, keys and values are contiguous.
        """
        result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            self.library, query, key, value, causal, allowed, starts, *(drawn or _NONE)
        )
        return result

    def cross_entropy_(self, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """The cross-entropies [N] of `targets` [N] given `logits` [N, V]; replaces the logits by their gradient."""
        losses = logits.new_empty(logits.size(0))
        self.library.cross_entropy(
            losses.data_ptr(), logits.data_ptr(), targets.data_ptr(), *logits.shape, smoothing / logits.size(1)
        )
        return losses


class FusibleLayer(nn.Module):
    """A layer that trains by `kernels` where it has them and they fit."""

    kernels: Kernels | None = None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, library: ctypes.CDLL, values: Tensor, residual: Tensor | None, bits: Tensor, least: int, scale: float
    ) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.library, ctx.least, ctx.scale = library, least, scale
        out = torch.empty_like(values)
        library.dropout(
            out.data_ptr(), _address(residual), values.data_ptr(), bits.data_ptr(), values.numel(), least, scale
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        ctx.library.dropout(out.data_ptr(), None, grad.data_ptr(), bits.data_ptr(), grad.numel(), ctx.least, ctx.scale)
        return None, out, grad if ctx.needs_input_grad[2] else None, None, None, None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, library: ctypes.CDLL, values: Tensor, trains: bool, bits: Tensor | None, least: int, scale: float
    ) -> Tensor:
        out, slopes = torch.empty_like(values), torch.empty_like(values) if trains else None
        library.gelu(out.data_ptr(), _address(slopes), values.data_ptr(), _address(bits), values.numel(), least, scale)
        # In place of values and bits: it is as much memory, and a product is all that is left to do.
        ctx.save_for_backward(slopes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return None, grad * slopes, None, None, None, None


class _Heads(ctypes.Structure):
    """`Heads` of kernels.cpp."""

    _fields_ = [("start", _P), ("sample", _N), ("head", _N), ("row", _N)]

    @classmethod
    def of(cls, values: Tensor) -> "_Heads":
        return cls(values.data_ptr(), *values.stride()[:3])


class _Sizes(ctypes.Structure):
    """`Attention` of kernels.cpp."""

    _fields_ = [
        *((name, _N) for name in ("samples", "heads", "queries", "keys", "width")),
        *((name, _I) for name in ("causal", "least")),
        *((name, _F) for name in ("factor", "scale")),
    ]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        allowed: Tensor | None,
        starts: Tensor | None,
        bits: Tensor | None,
        least: int,
        scale: float,
    ) -> Tensor:
        batch, heads, queries, width = query.shape
        sizes = _Sizes(batch, heads, queries, key.size(2), width, causal, least, width**-0.5, scale)
        allowed, starts = (None if tensor is None else tensor.contiguous() for tensor in (allowed, starts))
        out, log_totals = query.new_empty(batch, queries, heads, width), query.new_empty(batch, heads, queries)
        library.attention_forward(
            out.data_ptr(), log_totals.data_ptr(), *_pointers(query, key, value), _address(allowed),
            _address(starts), _address(bits), ctypes.byref(sizes),
        )  # fmt: skip
        ctx.save_for_backward(out, log_totals, query, key, value, allowed, starts, bits)
        ctx.library, ctx.sizes = library, sizes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, log_totals, query, key, value, allowed, starts, bits = ctx.saved_tensors
        grad, grad_query = grad.contiguous(), torch.empty_like(out)
        grad_key, grad_value = (out.new_empty(key.transpose(1, 2).shape) for _ in range(2))
        ctx.library.attention_backward(
            grad_query.data_ptr(), grad_key.data_ptr(), grad_value.data_ptr(), grad.data_ptr(), out.data_ptr(),
            log_totals.data_ptr(), *_pointers(query, key, value), _address(allowed), _address(starts), _address(bits),
            ctypes.byref(ctx.sizes),
        )  # fmt: skip
        grads = (tensor.transpose(1, 2) for tensor in (grad_query, grad_key, grad_value))
        return None, *grads, None, None, None, None, None, None


def _pointers(*tensors: Tensor) -> list[Any]:
    return [ctypes.byref(_Heads.of(tensor)) for tensor in tensors]
