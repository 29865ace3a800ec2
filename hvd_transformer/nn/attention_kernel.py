"""The attention of `cpp/attention.h` as autograd functions, for `Kernels`."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_transformer.nn.kernel_library import address

_F, _I, _N, _P = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Heads(ctypes.Structure):
    """The struct `Heads` of attention.h: the address and the strides of a tensor [B, H, T, D/H]."""

    _fields_ = [("start", _P), ("sample_stride", _N), ("head_stride", _N), ("row_stride", _N)]


class _AttentionParams(ctypes.Structure):
    """The struct `AttentionParams` of attention.h."""

    _fields_ = [
        *((name, _N) for name in ("batch", "heads", "queries", "keys", "head_dim")),
        *((name, _I) for name in ("causal", "dropout_threshold")),
        *((name, _F) for name in ("softmax_scale", "dropout_scale")),
    ]


class AttentionMask(NamedTuple):
    """Which weights of attention are not zero, and what dropout makes of them: see `Kernels.attention`."""

    causal: bool
    allowed: Tensor | None
    starts: Tensor | None
    dropout_bits: Tensor | None
    dropout_threshold: int
    dropout_scale: float


class AttentionFunction(torch.autograd.Function):
    """Of query [B, H, T, D/H], key and value [B, H, S, D/H]."""

    @staticmethod
    def forward(
        ctx: Any, library: ctypes.CDLL, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask
    ) -> Tensor:
        shape = (*query.shape[:3], key.size(2), query.size(3))
        return _forward(ctx, library, shape, [query, key, value], _heads(query, key, value), mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, num_keys = ctx.saved_tensors, ctx.params.keys
        batch_size, num_queries, *heads = grad.shape
        grads = [
            grad.new_empty(batch_size, length, *heads).transpose(1, 2) for length in (num_queries, num_keys, num_keys)
        ]
        _backward(ctx, grad, _heads(*grads), _heads(*saved[4:]), saved)
        return None, *grads, None


class SelfAttentionFunction(torch.autograd.Function):
    """Of query, key and value [B, T, 3, H, D/H], whose gradients are written to one tensor."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, stacked: Tensor, mask: AttentionMask) -> Tensor:
        batch_size, length, _, num_heads, head_dim = stacked.shape
        shape = (batch_size, num_heads, length, length, head_dim)
        return _forward(ctx, library, shape, [stacked], _stacked_heads(stacked), mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        stacked = saved[4]
        grads = torch.empty_like(stacked, memory_format=torch.contiguous_format)
        _backward(ctx, grad, _stacked_heads(grads), _stacked_heads(stacked), saved)
        return None, grads, None


def _forward(
    ctx: Any,
    library: ctypes.CDLL,
    shape: Sequence[int],
    tensors: Sequence[Tensor],
    heads: Sequence[Any],
    mask: AttentionMask,
) -> Tensor:
    """`shape`: B, H, T, S, D/H. `heads`: where query, key and value are in `tensors`, which are saved."""
    batch_size, num_heads, num_queries, _, head_dim = shape
    params = _AttentionParams(*shape, mask.causal, mask.dropout_threshold, head_dim**-0.5, mask.dropout_scale)
    allowed, starts = (None if tensor is None else tensor.contiguous() for tensor in (mask.allowed, mask.starts))
    bits = mask.dropout_bits
    out = tensors[0].new_empty(batch_size, num_queries, num_heads, head_dim)
    log_sum_exp = tensors[0].new_empty(batch_size, num_heads, num_queries)
    library.attention_forward(
        out.data_ptr(), log_sum_exp.data_ptr(), *heads, address(allowed), address(starts), address(bits),
        ctypes.byref(params),
    )  # fmt: skip
    ctx.save_for_backward(log_sum_exp, allowed, starts, bits, *tensors)
    ctx.library, ctx.params = library, params
    return out


def _backward(ctx: Any, grad: Tensor, grads: Sequence[Any], heads: Sequence[Any], saved: Sequence[Tensor]) -> None:
    """Write the gradients of query, key and value, where `grads` are, from `grad` [B, T, H, D/H]."""
    log_sum_exp, allowed, starts, bits, *_ = saved
    grad = grad.contiguous()
    ctx.library.attention_backward(
        *grads, grad.data_ptr(), log_sum_exp.data_ptr(), *heads, address(allowed), address(starts),
        address(bits), ctypes.byref(ctx.params),
    )  # fmt: skip


def _heads(*tensors: Tensor) -> list[Any]:
    """Where the heads of tensors [B, H, T, D/H] are."""
    return [ctypes.byref(_Heads(tensor.data_ptr(), *tensor.stride()[:3])) for tensor in tensors]


def _stacked_heads(stacked: Tensor) -> list[Any]:
    """Where those of query, key and value [B, T, 3, H, D/H] are."""
    sample, row, part, head, _ = stacked.stride()
    start, step = stacked.data_ptr(), part * stacked.element_size()
    return [ctypes.byref(_Heads(start + number * step, sample, head, row)) for number in range(3)]
