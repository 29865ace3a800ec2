"""Cross-entropy of a vocabulary projection, computed in chunks so that the full logits never exist at once."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hvd_transformer.nn.contracts import WeightGrads
from hvd_transformer.nn.dry_run import chunks
from hvd_transformer.nn.kernels import Kernels
from hvd_transformer.nn.matmul import autocast_dtype, count_pad_rows, linear, matmul, weight_grad_
from hvd_transformer.nn.parallel_layers import VocabShard, detach_with_anchor, local_vocab_index

# Tokens per chunk: a GPU wants large matrices. On a CPU at least CPU_CHUNK, and up to CPU_LOGITS logits: 16 MiB, which
# stay in a large cache, and below the 32 MiB from which glibc maps each block anew, page by page.
CPU_CHUNK, GPU_CHUNK = 256, 4096
CPU_LOGITS = 1 << 22


def fused_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int | None = None,
    weight_grads: WeightGrads | None = None,
    shard: VocabShard | None = None,
    smoothing: float = 0.0,
    kernels: Kernels | None = None,
    shadow: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of the cross-entropy of `hidden @ weight.T + bias`.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] → scalar in float32 or wider. Holds the logits of
    `chunk` tokens (None: a good number for the device) at a time, and computes their gradients with the loss, so that
    logits are computed once (the idea of Liger-Kernel's fused linear cross-entropy, arXiv 2410.10989, section 3.2). For
    backward it saves the smaller of the logits' gradients [N, V] and the weight's gradient [V, D].

    If `weight_grads` is given, weight and bias get no gradient: with N ≤ D `weight_grads` gets `hidden` and the
    logits' gradients in backward, otherwise the computed weight and bias gradients.

    `smoothing` is the share of each target's weight that is spread over the whole vocabulary (Szegedy et al. 2016,
    arXiv 1512.00567, section 7), as in torch's `label_smoothing`.

    With a `shard`, weight and bias have that shard's rows only. The ranks exchange two numbers per token, not the
    logits (Megatron-LM, arXiv 1909.08053, section 3), and all get the same result.

    `shadow` is the weight in the dtype of autocast (see `WeightGradLayer`); `kernels` are used where they fit.
    """
    if chunk is None:
        vocab_size = weight.size(0) if shard is None else shard.total  # the same on all ranks
        on_cpu = max(1, CPU_LOGITS // vocab_size // CPU_CHUNK) * CPU_CHUNK
        chunk = on_cpu if hidden.device.type == "cpu" else GPU_CHUNK
    anchor = None
    if not torch.is_grad_enabled():
        weight_grads = None
    if weight_grads is not None:
        weight, bias, anchor = detach_with_anchor(hidden, weight, bias)
    # Inside `Function.forward` needs_input_grad is also true under no_grad: evaluation would compute unused gradients.
    options = LossOptions(chunk, torch.is_grad_enabled(), weight_grads, shard, smoothing, kernels, shadow)
    loss: Tensor = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, anchor, options
    )
    return loss


class LossOptions(NamedTuple):
    """The arguments of `fused_cross_entropy` that get no gradient."""

    chunk: int
    grad_enabled: bool  # in the caller
    weight_grads: WeightGrads | None
    shard: VocabShard | None
    smoothing: float
    kernels: Kernels | None
    shadow: Tensor | None


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        anchor: Tensor | None,
        options: LossOptions,
    ) -> Tensor:
        chunk, grad_enabled, weight_grads, shard, smoothing, kernels, shadow = options
        (num_tokens, d_model), vocab_size = hidden.shape, weight.size(0)  # N, D, V; with a shard V is its rows
        accum_dtype = torch.promote_types(torch.promote_types(hidden.dtype, torch.float32), weight.dtype)
        loss = torch.zeros((), dtype=accum_dtype, device=hidden.device)
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        save_grad_logits = num_tokens <= d_model  # [N, V] is no larger than grad_weight [V, D]
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.empty_like(weight) if needs_grad and not save_grad_logits else None
        grad_bias = torch.zeros_like(bias) if grad_weight is not None and bias is not None else None
        saved_grad_logits: list[Tensor] = []
        compute_dtype = autocast_dtype(hidden)
        matmul_weight = _matmul_weight(weight, compute_dtype, shadow)
        matmul_weight, matmul_bias, num_pad_rows = _pad_vocabulary(matmul_weight, bias)
        for rows in chunks(num_tokens, chunk, accumulates=not save_grad_logits):
            hidden_chunk, target = hidden[rows], targets[rows, None]  # [C, D], [C, 1]
            if compute_dtype is not None:
                hidden_chunk = hidden_chunk.to(compute_dtype)
            padded_logits = linear(hidden_chunk, matmul_weight, matmul_bias)  # [C, V + num_pad_rows]
            logits = padded_logits[:, :vocab_size] if num_pad_rows else padded_logits  # [C, V]
            if grad_hidden is not None and shard is None and kernels is not None and kernels.fit(logits):
                loss += kernels.cross_entropy_(logits, target, smoothing).sum()
                grad_logits = logits
            else:
                grad_logits = _add_losses(loss, logits, target, smoothing, shard, needs_grad)
            if grad_hidden is None:
                continue
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            if grad_logits.dtype != logits.dtype:
                grad_logits = logits.copy_(grad_logits)  # in place: the padding columns of `padded_logits` stay zero
            grad_hidden[rows] = matmul(padded_logits if num_pad_rows else grad_logits, matmul_weight)
            if grad_weight is None:
                saved_grad_logits.append(grad_logits)
            else:
                weight_grad_(grad_weight, grad_logits, hidden_chunk, first=rows.start == 0, kernels=kernels)
        if shard is not None:
            waits = [shard.group.sum_(sums) for sums in (loss[None], grad_hidden) if sums is not None]
            for wait in waits:
                wait()
        saved_hidden = hidden if saved_grad_logits else None
        ctx.save_for_backward(saved_hidden, grad_hidden, grad_weight, grad_bias, *saved_grad_logits)
        ctx.weight_grads, ctx.kernels = weight_grads, kernels
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, grad_hidden, grad_weight, grad_bias, *saved_grad_logits = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None and ctx.weight_grads is not None:
            ctx.weight_grads.put_formed(grad_weight, grad_bias, grad)
            grad_weight = grad_bias = None
        elif grad_weight is not None:
            grad_weight = grad_weight * grad.to(grad_weight.dtype)
            grad_bias = None if grad_bias is None else grad_bias * grad.to(grad_bias.dtype)
        if saved_grad_logits:
            grad_logits = torch.cat(saved_grad_logits) if len(saved_grad_logits) > 1 else saved_grad_logits[0]  # [N, V]
            grad_logits = grad_logits * grad.to(grad_logits.dtype)
            # Detached: a deferred weight gradient would otherwise keep the graph of `hidden` alive.
            hidden = hidden.detach().to(grad_logits.dtype)
            if ctx.weight_grads is not None:
                ctx.weight_grads.put(hidden, grad_logits, ctx.kernels)
            else:
                weight_dtype, bias_dtype = ctx.dtypes
                grad_weight = matmul(grad_logits.t(), hidden).to(weight_dtype)
                grad_bias = None if bias_dtype is None else grad_logits.sum(0, dtype=bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _matmul_weight(weight: Tensor, compute_dtype: torch.dtype | None, shadow: Tensor | None) -> Tensor:
    """The weight in the dtype of the matrix product."""
    if compute_dtype is None:
        return weight
    return weight.to(compute_dtype) if shadow is None else shadow


def _pad_vocabulary(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """Append zero rows to weight [V, D] and bias [V] if a GPU's kernels need it to be fast; also returns their number.

    Padding logits are zero. They stay zero when logits are replaced by their gradients, so they add nothing.
    """
    if not (weight.is_cuda and weight.dtype.itemsize == 2):
        return weight, bias, 0
    if not (num_pad_rows := count_pad_rows(weight)):
        return weight, bias, 0
    padded_bias = None if bias is None else F.pad(bias, (0, num_pad_rows))
    return F.pad(weight, (0, 0, 0, num_pad_rows)), padded_bias, num_pad_rows


def _add_losses(
    loss: Tensor, logits: Tensor, target: Tensor, smoothing: float, shard: VocabShard | None, needs_grad: bool
) -> Tensor:
    """Add the cross-entropies of a chunk to `loss`. Returns the gradient of the logits: softmax − targets.

    logits [C, V], target [C, 1] → [C, V] in the dtype of `loss`; without `needs_grad` the result is meaningless.
    """
    vocab_size = logits.size(-1) if shard is None else shard.total
    token_smoothing = smoothing / vocab_size  # the target probability of each token of the vocabulary
    if shard is None:
        out = logits if logits.dtype == loss.dtype and logits.device.type == "cpu" else None
        # In place: a new matrix would push the logits out of the cache.
        log_probs, is_local = torch.log_softmax(logits, -1, dtype=loss.dtype, out=out), None
        loss -= (1 - smoothing) * log_probs.gather(1, target).sum()
    else:
        log_probs, is_local, target = _local_log_probs(logits.to(loss.dtype), target, shard)
        loss -= (1 - smoothing) * (log_probs.gather(1, target) * is_local).sum()
    if smoothing:
        loss -= token_smoothing * log_probs.sum()
    if not needs_grad:
        return log_probs
    grad_logits = log_probs.exp_().sub_(token_smoothing) if smoothing else log_probs.exp_()
    ones = torch.ones_like(target, dtype=grad_logits.dtype) if is_local is None else is_local.to(grad_logits.dtype)
    return grad_logits.scatter_add_(1, target, (smoothing - 1) * ones)


def _local_log_probs(logits: Tensor, target: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities [C, V'] of the shard's tokens; which targets [C, 1] are among them, and at which index.

    logits [C, V'], target [C, 1] as token numbers of the whole vocabulary. Each rank contributes its largest logit and
    the sum of its exponentials relative to that: together they give the log-sum-exp over the vocabulary.
    """
    local_max = logits.amax(-1)  # [C]
    local_sum = (logits - local_max[:, None]).exp_().sum(-1)  # [C]
    rank_max, rank_sum = shard.group.gather(torch.stack([local_max, local_sum])).unbind(1)  # [ranks, C] each
    global_max = rank_max.amax(0)
    log_sum_exp = global_max + (rank_sum * (rank_max - global_max).exp_()).sum(0).log_()
    is_local, local_target = local_vocab_index(target, shard.rows)
    return logits - log_sum_exp[:, None], is_local, local_target
