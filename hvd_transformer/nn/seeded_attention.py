"""Attention with dropout on a GPU: the weights [B, H, T, S] never exist as a whole, nor does their dropout mask.

torch's fused kernels draw the mask inside, from a seed and a count that they read of the device's generator. Stages in
threads share that generator, so it is seeded and read under a lock.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_transformer.nn.dropout import Dropout, seed_here
from hvd_transformer.nn.planned import on_gpu
from hvd_transformer.nn.products import autocast_dtype

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WIDE, _WIDEST = 192, 256  # a head of the fused kernels
_STEP = 16  # rows of a bias begin at multiples of so many numbers
# Their overloads: from version 2.13 on torch has several, among which it would look at each call.
_flash = aten._scaled_dot_product_flash_attention.default
_flash_backward = aten._scaled_dot_product_flash_attention_backward.default
_efficient = aten._scaled_dot_product_efficient_attention.default
_efficient_backward = aten._scaled_dot_product_efficient_attention_backward.default
_lock = threading.Lock()


def fits(query: Tensor) -> bool:
    """Whether fused kernels take these heads [B, H, T, W]."""
    width, dtype = query.size(-1), autocast_dtype(query) or query.dtype
    if dtype == torch.float64 or (dtype == torch.bfloat16 and query.is_cuda and not is_ampere(query)):
        return False
    return on_gpu(query) and width % 8 == 0 and width <= _WIDEST


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# As torch.compiler.assume_constant_result, which would import the compiler, that takes seconds.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_ampere(query: Tensor) -> bool:
    """Whether its GPU is of this generation or a later one: others have no flash attention and no bfloat16."""
    return _capability(query.device) >= (8, 0)


def _takes_flash(query: Tensor, bias: Tensor | None) -> bool:
    """Whether flash attention takes it, with dropout: torch's backward of wide heads computes nothing then, unless the
    GPU has much shared memory, as those for data centres have."""
    if bias is not None or query.dtype not in _HALF or not is_ampere(query):
        return False
    capability = _capability(query.device)
    return query.size(-1) <= _WIDE or capability == (8, 0) or capability[0] in (9, 10)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: Dropout) -> Tensor:
    """Scaled dot-product attention with queries [B, H, T, W] over keys and values [B, H, S, W]: [B, H, T, W].

    `mask` is added to the scores, or says which to keep, and broadcasts to [B, H, T, S]; with `causal`, T = S and there
    is no mask. A head that `fits` only.
    """
    narrow = autocast_dtype(query)
    if narrow is not None:
        query, key, value = (heads.to(narrow) for heads in (query, key, value))
    bias = None if mask is None else _bias(mask, query, key.size(2))
    if not query.is_cuda:  # in `plan`
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=causal)
    if torch.compiler.is_compiling():
        attention = torch.ops.hvd_transformer.attention
        result: Tensor = attention(query, key, value, bias, dropout.key, dropout.rate, causal)[0]
        return result
    with _seeded(query.device, dropout.seed()):
        return _forward(query, key, value, bias, dropout.rate, causal)[0]


def _bias(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    """The mask as what is added to the scores, in the kernels' shape and alignment."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    padded = F.pad(mask.to(query.dtype), (0, -keys % _STEP))[..., :keys]
    return padded.expand(*query.shape[:3], keys)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """The device's generator is at the beginning of this seed inside; no other thread reads it."""
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
    """The result; what backward needs: the logarithms of the sums of exponentials, and the state of the generator."""
    if _takes_flash(query, bias):
        out, sums, _, _, _, _, state, more, _ = _flash(query, key, value, rate, causal)
        return out, sums, state, more
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _efficient(query, key, value, bias, True, rate, causal)
    return found


# The same as operators of compiled graphs, which must know how memory is laid out: as [B, T, H, W].


def _by_position(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _all_by_position(heads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = map(_by_position, heads)
    return query, key, value


@torch.library.custom_op("hvd_transformer::attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, place: Tensor, rate: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with _seeded(query.device, seed_here(*place.tolist())):
        out, sums, state, more = _forward(query, key, value, bias, rate, causal)
    out = _by_position(out)
    if _takes_flash(query, bias):
        return out, sums, state.view(torch.int64), torch.empty(0, dtype=torch.int64)
    return out, sums, state.cpu(), more.cpu()


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, place: Tensor, rate: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, sums, *_ = _forward(query, key, value, bias, rate, causal)  # of fake tensors
    out = _by_position(torch.empty_like(query))
    if _takes_flash(query, bias):
        state, more = torch.empty(2, dtype=torch.int64, device=query.device), torch.empty(0, dtype=torch.int64)
    else:
        state, more = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return out, sums, state, more


@torch.library.custom_op("hvd_transformer::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    more: Tensor,
    rate: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if _takes_flash(query, bias):
        seed = state.view(torch.uint64)
        grads: tuple[Tensor, Tensor, Tensor] = _flash_backward(
            grad, query, key, value, out, sums, None, None, query.size(2), key.size(2), rate, causal, seed, seed[:0]
        )
        return _all_by_position(grads)
    wanted = [True, True, True, False]
    *grads, _ = _efficient_backward(grad, query, key, value, bias, out, sums, state, more, rate, wanted, causal)
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
