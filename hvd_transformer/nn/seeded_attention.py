"""Fused attention with seeded dropout on a GPU: neither the weights [B, H, T, S] nor their dropout mask are stored.

torch's fused kernels draw the mask inside, from a Philox seed and offset that they read from the device's generator.
Stages in threads share that generator, so it is seeded and read under a lock.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_transformer.nn.dropout import Dropout, current_seed
from hvd_transformer.nn.dry_run import on_gpu
from hvd_transformer.nn.matmul import autocast_dtype

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256  # of the fused kernels
_MAX_FLASH_HEAD_DIM = 192  # of flash attention's backward with dropout, unless the GPU has much shared memory
_BIAS_ALIGNMENT = 16  # rows of a bias begin at multiples of this many elements
# The overloads are chosen here: torch 2.13 and later have several, and would search them in each call.
_flash = aten._scaled_dot_product_flash_attention.default
_flash_backward = aten._scaled_dot_product_flash_attention_backward.default
_efficient = aten._scaled_dot_product_efficient_attention.default
_efficient_backward = aten._scaled_dot_product_efficient_attention_backward.default
_lock = threading.Lock()


def fits(query: Tensor) -> bool:
    """Whether fused kernels support queries [B, H, T, W] of this head dimension and dtype."""
    head_dim, dtype = query.size(-1), autocast_dtype(query) or query.dtype
    if dtype == torch.float64 or (dtype == torch.bfloat16 and query.is_cuda and not is_ampere(query)):
        return False
    return on_gpu(query) and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM


def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)  # which the compiler of torch 2.11 cannot trace


# Equivalent to the decorator torch.compiler.assume_constant_result, which imports the compiler: that takes seconds.
_is_ampere._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_ampere(query: Tensor) -> bool:
    """Whether the query's GPU is Ampere or later: earlier ones have no flash attention and no bfloat16."""
    return _is_ampere(query.device)


def _takes_flash(query: Tensor, bias: Tensor | None) -> bool:
    """Whether flash attention supports these queries with dropout.

    With dropout, torch's backward for large head dimensions computes nothing, unless the GPU has as much shared memory
    as data-center GPUs have.
    """
    if bias is not None or query.dtype not in _HALF or not is_ampere(query):
        return False
    capability = torch.cuda.get_device_capability(query.device)
    return query.size(-1) <= _MAX_FLASH_HEAD_DIM or capability == (8, 0) or capability[0] in (9, 10)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: Dropout) -> Tensor:
    """Scaled dot-product attention with queries [B, H, T, W] over keys and values [B, H, S, W]: [B, H, T, W].

    `mask` broadcasts to [B, H, T, S]: floats are added to the scores, booleans mark the keys to attend to. With
    `causal`, T = S and there is no mask. Requires `fits(query)`.
    """
    compute_dtype = autocast_dtype(query)
    if compute_dtype is not None:
        query, key, value = (heads.to(compute_dtype) for heads in (query, key, value))
    bias = None if mask is None else _bias(mask, query, key.size(2))
    if not query.is_cuda:  # a dry run of `plan`
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=causal)
    if torch.compiler.is_compiling():
        attention = torch.ops.hvd_transformer.attention
        result: Tensor = attention(query, key, value, bias, dropout.key, dropout.rate, causal)[0]
        return result
    with _seeded(query.device, dropout.seed()):
        return _forward(query, key, value, bias, dropout.rate, causal)[0]


def _bias(mask: Tensor, query: Tensor, num_keys: int) -> Tensor:
    """Turn the mask into a bias that is added to the scores, in the kernels' shape and alignment."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    mask = mask.to(query.dtype)
    if missing := -num_keys % _BIAS_ALIGNMENT:  # padding by nothing would copy the mask, for each block anew
        mask = F.pad(mask, (0, missing))[..., :num_keys]
    return mask.expand(*query.shape[:3], num_keys)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's generator inside, where no other thread reads it; restores its state afterwards."""
    generator = torch.cuda.default_generators[device.index]
    with _lock:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, rate: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and what backward needs: the log-sum-exp of the scores, and the Philox seed and offset of dropout."""
    if _takes_flash(query, bias):
        out, log_sum_exp, _, _, _, _, philox_seed, philox_offset, _ = _flash(query, key, value, rate, causal)
        return out, log_sum_exp, philox_seed, philox_offset
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _efficient(query, key, value, bias, True, rate, causal)
    return result


# Custom operators for compiled graphs. A graph must know the memory layout of their results, here [B, T, H, W].


def _by_position(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _all_by_position(heads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = map(_by_position, heads)
    return query, key, value


@torch.library.custom_op("hvd_transformer::attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_key: Tensor, rate: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with _seeded(query.device, current_seed(*dropout_key.tolist())):
        out, log_sum_exp, philox_seed, philox_offset = _forward(query, key, value, bias, rate, causal)
    out = _by_position(out)
    if _takes_flash(query, bias):
        # Flash attention returns both numbers in one tensor.
        return out, log_sum_exp, philox_seed.view(torch.int64), torch.empty(0, dtype=torch.int64)
    return out, log_sum_exp, philox_seed.cpu(), philox_offset.cpu()


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_key: Tensor, rate: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, log_sum_exp, *_ = _forward(query, key, value, bias, rate, causal)  # on fake tensors
    out = _by_position(torch.empty_like(query))
    if _takes_flash(query, bias):
        philox_seed = torch.empty(2, dtype=torch.int64, device=query.device)
        philox_offset = torch.empty(0, dtype=torch.int64)
    else:
        philox_seed, philox_offset = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return out, log_sum_exp, philox_seed, philox_offset


@torch.library.custom_op("hvd_transformer::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    rate: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if _takes_flash(query, bias):
        state = philox_seed.view(torch.uint64)
        grads: tuple[Tensor, Tensor, Tensor] = _flash_backward(
            grad, query, key, value, out, log_sum_exp, None, None, query.size(2), key.size(2), rate, causal,
            state, state[:0],
        )  # fmt: skip
        return _all_by_position(grads)
    needs_grad = [True, True, True, False]  # query, key, value, bias
    *grads, _ = _efficient_backward(
        grad, query, key, value, bias, out, log_sum_exp, philox_seed, philox_offset, rate, needs_grad, causal
    )
    return _all_by_position(grads)


@_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _all_by_position([torch.empty_like(heads) for heads in (query, key, value)])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, bias, _, ctx.rate, ctx.causal = inputs
    ctx.save_for_backward(query, key, value, bias, *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = _attention_backward(grad, *ctx.saved_tensors, ctx.rate, ctx.causal)
    return *grads, None, None, None, None


_attention.register_autograd(_backward, setup_context=_save)
