"""Fused CPU kernels of a training step: norms, dropout + residual, bias + GELU + dropout, attention, cross-entropy, and
weight gradients.

They are autograd functions between the linear layers, which at most leave their bias to GELU. So the kernels work with
everything that builds on linear layers: weight-gradient stores, tensor groups, recomputation, stages in threads. The
calls release Python's global interpreter lock. Results equal those of torch's operations up to rounding, with the same
dropout mask.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hvd_transformer.nn.attention_kernel import AttentionFunction, AttentionMask, SelfAttentionFunction
from hvd_transformer.nn.kernel_library import address

_F, _I, _N, _P = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "random_bits": [_P, _P, _N],
    "dropout": [_P, _P, _P, _P, _N, _I, _F],
    "gelu": [_P, _P, _P, _P, _P, _N, _N, _I, _F],
    "norm_forward": [_P, _P, _P, _P, _P, _N, _N, _I, _F],
    "norm_backward": [_P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _I],
    "attention_forward": [_P] * 9,
    "attention_backward": [_P] * 12,
    "weight_grad": [_P, _P, _P, _N, _N, _N, _I],
    "cross_entropy": [_P, _P, _P, _N, _N, _F],
}


class DropoutBits(NamedTuple):
    """16 random bits per value: it is dropped if they are below `threshold`, otherwise multiplied by `scale`."""

    bits: Tensor  # int16
    threshold: int
    scale: float


def dropout_threshold(rate: float) -> tuple[int, float]:
    """Return `threshold` and `scale` of `DropoutBits`. `scale` is exact for the rate rounded to 65,536ths."""
    num_dropped = min(round(rate * 2**16), 2**16 - 1)  # of the 2^16 values of 16 bits
    return num_dropped - 2**15, 2**16 / (2**16 - num_dropped)


_NO_DROPOUT = (None, 0, 1.0)  # instead of `DropoutBits`


class Kernels:
    """The functions of the compiled library, for tensors that `fit`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
        self.library = library

    @staticmethod
    def fit(*tensors: Tensor | None, rows: bool = False) -> bool:
        """Whether the kernels support these tensors: float32, on the CPU, contiguous (`rows`: only each row)."""
        for tensor in tensors:  # no generator: Python is slow between large products, which have filled the caches
            if tensor is None:
                continue
            if tensor.dtype != torch.float32 or not tensor.is_cpu:
                return False
            if not (tensor.stride(-1) == 1 if rows else tensor.is_contiguous()):
                return False
        return True

    def draw(self, shape: Sequence[int], rate: float, seed: int) -> DropoutBits:
        """Draw random bits for values of this shape from SFC64: the same bits as numpy's with this seed."""
        count = torch.Size(shape).numel()
        state = np.random.SFC64(seed).state["state"]["state"]
        bits = torch.empty(-(-count // 4), dtype=torch.int64)
        self.library.random_bits(state.ctypes.data, bits.data_ptr(), bits.numel())
        return DropoutBits(bits.view(torch.int16)[:count].view(shape), *dropout_threshold(rate))

    def dropout(self, values: Tensor, dropout_bits: DropoutBits, residual: Tensor | None = None) -> Tensor:
        """Apply dropout to `values` and add `residual`; all have the same shape."""
        result: Tensor = _Dropout.apply(self.library, values, residual, *dropout_bits)  # type: ignore[no-untyped-call]
        return result

    def gelu(self, values: Tensor, dropout_bits: DropoutBits | None, bias: Tensor | None = None) -> Tensor:
        """Apply GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) to values [..., D] + `bias` [D], then dropout.

        The bias gets no gradient here: it is the sum of that of the values.
        """
        needs_grad = torch.is_grad_enabled() and values.requires_grad
        result: Tensor = _Gelu.apply(  # type: ignore[no-untyped-call]
            self.library, values, None if bias is None else bias.detach(), needs_grad, *(dropout_bits or _NO_DROPOUT)
        )
        return result

    def norm(
        self, values: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centers: bool
    ) -> tuple[Tensor, Tensor]:
        """Layer norm of values [..., D], without `centers` root mean square norm; and the values themselves.

        A caller that also uses the values, as a residual connection does, takes the second result: backward then adds
        up the gradients of both where it computes them.
        """
        result: tuple[Tensor, Tensor] = _Norm.apply(  # type: ignore[no-untyped-call]
            self.library, values, weight, bias, epsilon, centers
        )
        return result

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        allowed: Tensor | None,
        dropout_bits: DropoutBits | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Scaled dot-product attention: query [B, H, T, D/H], key and value [B, H, S, D/H] → [B, T, H, D/H].

        `allowed` [B, S] marks the keys to attend to. If `causal`, the queries are the last T of the S positions.
        `starts` [B, T] is the first key that each query attends to and must not decrease; earlier keys cost no time.
        `dropout_bits` of the weights have the shape [B, H, T, S]. The weights are never stored as a whole
        (FlashAttention, Dao et al. 2022, arXiv 2205.14135). Rows of queries, keys and values must be contiguous.
        """
        mask = AttentionMask(causal, allowed, starts, *(dropout_bits or _NO_DROPOUT))
        result: Tensor = AttentionFunction.apply(  # type: ignore[no-untyped-call]
            self.library, query, key, value, mask
        )
        return result

    def self_attention(
        self,
        stacked: Tensor,
        causal: bool,
        allowed: Tensor | None,
        dropout_bits: DropoutBits | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """The same of query, key and value in one tensor [B, T, 3, H, D/H]; its gradient needs no copies."""
        mask = AttentionMask(causal, allowed, starts, *(dropout_bits or _NO_DROPOUT))
        result: Tensor = SelfAttentionFunction.apply(self.library, stacked, mask)  # type: ignore[no-untyped-call]
        return result

    def weight_grad_(self, out: Tensor, grad: Tensor, values: Tensor, *, first: bool) -> None:
        """Compute `out += grad.T @ values`, or `=` if `first`: out [M, K], grad [N, M], values [N, K]."""
        self.library.weight_grad(
            out.data_ptr(), grad.data_ptr(), values.data_ptr(), *grad.shape, values.size(1), not first
        )

    def cross_entropy_(self, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the cross-entropies [N] of `targets` [N] given `logits` [N, V]. The gradient replaces the logits."""
        losses = logits.new_empty(logits.size(0))
        self.library.cross_entropy(
            losses.data_ptr(), logits.data_ptr(), targets.data_ptr(), *logits.shape, smoothing / logits.size(1)
        )
        return losses


class FusibleLayer(nn.Module):
    """A layer that uses `kernels` in training, if they are set and fit its tensors."""

    kernels: Kernels | None = None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        values: Tensor,
        residual: Tensor | None,
        bits: Tensor,
        threshold: int,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.library, ctx.threshold, ctx.scale = library, threshold, scale
        out = torch.empty_like(values)
        library.dropout(
            out.data_ptr(), address(residual), values.data_ptr(), bits.data_ptr(), values.numel(), threshold, scale
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        ctx.library.dropout(
            out.data_ptr(), None, grad.data_ptr(), bits.data_ptr(), grad.numel(), ctx.threshold, ctx.scale
        )
        return None, out, grad if ctx.needs_input_grad[2] else None, None, None, None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        values: Tensor,
        bias: Tensor | None,
        needs_grad: bool,
        bits: Tensor | None,
        threshold: int,
        scale: float,
    ) -> Tensor:
        out, derivative = torch.empty_like(values), torch.empty_like(values) if needs_grad else None
        width = values.size(-1)
        library.gelu(
            out.data_ptr(), address(derivative), values.data_ptr(), address(bias), address(bits),
            values.numel() // max(1, width), width, threshold, scale,
        )  # fmt: skip
        # The derivative of GELU and dropout together is saved instead of values and bits: it takes as much memory, and
        # backward is one multiplication.
        ctx.save_for_backward(derivative)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (derivative,) = ctx.saved_tensors
        # In place, as nothing else needs the derivative; autograd refuses a second backward.
        return None, derivative.mul_(grad), None, None, None, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        centers: bool,
    ) -> tuple[Tensor, Tensor]:
        width = weight.numel()
        out, statistics = torch.empty_like(values), values.new_empty(values.numel() // width, 2)
        library.norm_forward(
            out.data_ptr(), statistics.data_ptr(), values.data_ptr(), weight.data_ptr(), address(bias),
            statistics.size(0), width, centers, epsilon,
        )  # fmt: skip
        ctx.save_for_backward(values, weight, statistics)
        ctx.library, ctx.centers, ctx.has_bias = library, centers, bias is not None
        ctx.set_materialize_grads(False)
        return out, values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, residual, None, None, None, None
        values, weight, statistics = ctx.saved_tensors
        grad, residual = grad.contiguous(), None if residual is None else residual.contiguous()
        grad_values, grad_weight = torch.empty_like(values), torch.empty_like(weight)
        grad_bias = torch.empty_like(weight) if ctx.has_bias else None
        ctx.library.norm_backward(
            grad_values.data_ptr(), grad_weight.data_ptr(), address(grad_bias), grad.data_ptr(), address(residual),
            values.data_ptr(), weight.data_ptr(), statistics.data_ptr(), *statistics.shape[:1], weight.numel(),
            ctx.centers,
        )  # fmt: skip
        return None, grad_values, grad_weight, grad_bias, None, None
