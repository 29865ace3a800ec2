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
        result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            self.library, query, key, value, _Mask(causal, allowed, starts, dropout_bits)
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
        result: Tensor = _SelfAttention.apply(  # type: ignore[no-untyped-call]
            self.library, stacked, _Mask(causal, allowed, starts, dropout_bits)
        )
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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
            out.data_ptr(), _address(residual), values.data_ptr(), bits.data_ptr(), values.numel(), threshold, scale
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
            out.data_ptr(), _address(derivative), values.data_ptr(), _address(bias), _address(bits),
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
            out.data_ptr(), statistics.data_ptr(), values.data_ptr(), weight.data_ptr(), _address(bias),
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
            grad_values.data_ptr(), grad_weight.data_ptr(), _address(grad_bias), grad.data_ptr(), _address(residual),
            values.data_ptr(), weight.data_ptr(), statistics.data_ptr(), *statistics.shape[:1], weight.numel(),
            ctx.centers,
        )  # fmt: skip
        return None, grad_values, grad_weight, grad_bias, None, None


class _Heads(ctypes.Structure):
    """The struct `Heads` of kernels.cpp: the address and the strides of a tensor [B, H, T, D/H]."""

    _fields_ = [("start", _P), ("sample_stride", _N), ("head_stride", _N), ("row_stride", _N)]


class _AttentionParams(ctypes.Structure):
    """The struct `AttentionParams` of kernels.cpp."""

    _fields_ = [
        *((name, _N) for name in ("batch", "heads", "queries", "keys", "head_dim")),
        *((name, _I) for name in ("causal", "dropout_threshold")),
        *((name, _F) for name in ("softmax_scale", "dropout_scale")),
    ]


class _Mask(NamedTuple):
    """Which weights of attention are not zero: see `Kernels.attention`."""

    causal: bool
    allowed: Tensor | None
    starts: Tensor | None
    dropout_bits: DropoutBits | None


class _Attention(torch.autograd.Function):
    """Of query [B, H, T, D/H], key and value [B, H, S, D/H]."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, query: Tensor, key: Tensor, value: Tensor, mask: _Mask) -> Tensor:
        shape = (*query.shape[:3], key.size(2), query.size(3))
        return _attention_forward(ctx, library, shape, [query, key, value], _heads(query, key, value), mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, num_keys = ctx.saved_tensors, ctx.params.keys
        batch_size, num_queries, *heads = grad.shape
        grads = [
            grad.new_empty(batch_size, length, *heads).transpose(1, 2) for length in (num_queries, num_keys, num_keys)
        ]
        _attention_backward(ctx, grad, _heads(*grads), _heads(*saved[4:]), saved)
        return None, *grads, None


class _SelfAttention(torch.autograd.Function):
    """Of query, key and value [B, T, 3, H, D/H], whose gradients are written to one tensor."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, stacked: Tensor, mask: _Mask) -> Tensor:
        batch_size, length, _, num_heads, head_dim = stacked.shape
        shape = (batch_size, num_heads, length, length, head_dim)
        return _attention_forward(ctx, library, shape, [stacked], _stacked_heads(stacked), mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        stacked = saved[4]
        grads = torch.empty_like(stacked, memory_format=torch.contiguous_format)
        _attention_backward(ctx, grad, _stacked_heads(grads), _stacked_heads(stacked), saved)
        return None, grads, None


def _attention_forward(
    ctx: Any, library: ctypes.CDLL, shape: Sequence[int], tensors: Sequence[Tensor], heads: Sequence[Any], mask: _Mask
) -> Tensor:
    """`shape`: B, H, T, S, D/H. `heads`: where query, key and value are in `tensors`, which are saved."""
    batch_size, num_heads, num_queries, _, head_dim = shape
    bits, threshold, scale = mask.dropout_bits or _NO_DROPOUT
    params = _AttentionParams(*shape, mask.causal, threshold, head_dim**-0.5, scale)
    allowed, starts = (None if tensor is None else tensor.contiguous() for tensor in (mask.allowed, mask.starts))
    out = tensors[0].new_empty(batch_size, num_queries, num_heads, head_dim)
    log_sum_exp = tensors[0].new_empty(batch_size, num_heads, num_queries)
    library.attention_forward(
        out.data_ptr(), log_sum_exp.data_ptr(), *heads, _address(allowed), _address(starts), _address(bits),
        ctypes.byref(params),
    )  # fmt: skip
    ctx.save_for_backward(log_sum_exp, allowed, starts, bits, *tensors)
    ctx.library, ctx.params = library, params
    return out


def _attention_backward(
    ctx: Any, grad: Tensor, grads: Sequence[Any], heads: Sequence[Any], saved: Sequence[Tensor]
) -> None:
    """Write the gradients of query, key and value, where `grads` are, from `grad` [B, T, H, D/H]."""
    log_sum_exp, allowed, starts, bits, *_ = saved
    grad = grad.contiguous()
    ctx.library.attention_backward(
        *grads, grad.data_ptr(), log_sum_exp.data_ptr(), *heads, _address(allowed), _address(starts),
        _address(bits), ctypes.byref(ctx.params),
    )  # fmt: skip


def _heads(*tensors: Tensor) -> list[Any]:
    """Where the heads of tensors [B, H, T, D/H] are."""
    return [ctypes.byref(_Heads(tensor.data_ptr(), *tensor.stride()[:3])) for tensor in tensors]


def _stacked_heads(stacked: Tensor) -> list[Any]:
    """Where those of query, key and value [B, T, 3, H, D/H] are."""
    sample, row, part, head, _ = stacked.stride()
    start, step = stacked.data_ptr(), part * stacked.element_size()
    return [ctypes.byref(_Heads(start + number * step, sample, head, row)) for number in range(3)]
