"""Cross-entropy of a vocabulary projection, computed in chunks so that the full logits never exist at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hvd_transformer.nn.contracts import WeightGrads
from hvd_transformer.nn.kernels import Kernels
from hvd_transformer.nn.parallel_layers import VocabShard, local_vocab_index, out_of_graph
from hvd_transformer.nn.planned import chunks
from hvd_transformer.nn.products import add_product_, autocast_dtype, zeros_beside

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
    `chunk` tokens (None: a good number for the device) at a time, and forms their gradients beside the loss, so that
    logits are computed once (the idea of Liger-Kernel's fused linear cross-entropy, arXiv 2410.10989, section 3.2). For
    backward it keeps the smaller of the logits' gradients [N, V] and the weight's gradient [V, D].

    While `weight_grads` is given, weight and bias get no gradient: with N ≤ D `weight_grads` gets `hidden` and the
    logits' gradients in backward, otherwise the formed gradients.

    `smoothing` is the share of each target's weight that is spread over the whole vocabulary (Szegedy et al. 2016,
    arXiv 1512.00567, section 7), as in torch's `label_smoothing`.

    With a `shard`, weight and bias have that shard's rows only. The ranks exchange two numbers per token, not the
    logits (Megatron-LM, arXiv 1909.08053, section 3), and all get the same result.
    """
    if chunk is None:
        vocab_size = weight.size(0) if shard is None else shard.total  # the same on all ranks
        on_cpu = max(1, CPU_LOGITS // vocab_size // CPU_CHUNK) * CPU_CHUNK
        chunk = on_cpu if hidden.device.type == "cpu" else GPU_CHUNK
    anchor = None
    if not torch.is_grad_enabled():
        weight_grads = None
    if weight_grads is not None:
        weight, bias, anchor = out_of_graph(hidden, weight, bias)
    # Inside `forward` gradients look wanted also under no_grad: evaluation would form them in vain.
    wants = torch.is_grad_enabled()
    loss: Tensor = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, chunk, wants, weight_grads, anchor, shard, smoothing, kernels, shadow
    )
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        wants: bool,
        grads: WeightGrads | None,
        anchor: Tensor | None,
        shard: VocabShard | None,
        smoothing: float,
        kernels: Kernels | None,
        shadow: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=torch.promote_types(wide, weight.dtype), device=hidden.device)
        wants_gradient = wants and any(ctx.needs_input_grad)
        keeps_slopes = hidden.size(0) <= hidden.size(1)
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_weight = torch.empty_like(weight) if wants_gradient and not keeps_slopes else None
        grad_bias = torch.zeros_like(bias) if grad_weight is not None and bias is not None else None
        slopes: list[Tensor] = []
        narrow = autocast_dtype(hidden)
        factor = weight if narrow is None else weight.to(narrow) if shadow is None else shadow
        offset, num_zeros = bias, 0
        if factor.is_cuda and factor.dtype.itemsize == 2:
            num_zeros = zeros_beside(factor)
            factor, offset = F.pad(factor, (0, 0, 0, num_zeros)), None if bias is None else F.pad(bias, (0, num_zeros))
        for part in chunks(hidden.size(0), chunk, sums=not keeps_slopes):
            values, goal = hidden[part], targets[part, None]
            if narrow is not None:
                values = values.to(narrow)
            whole = F.linear(values, factor, offset)
            logits = whole[:, : weight.size(0)] if num_zeros else whole
            if grad_hidden is not None and shard is None and kernels is not None and kernels.fit(logits):
                loss += kernels.cross_entropy_(logits, goal, smoothing).sum()
                slope = logits
            else:
                slope = _add_losses(loss, logits, goal, smoothing, shard, wants_gradient)
            if grad_hidden is None:
                continue
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            if slope.dtype != logits.dtype:
                slope = logits.copy_(slope)  # beside the zeros of `whole`
            grad_hidden[part] = (whole if num_zeros else slope) @ factor
            if grad_weight is None:
                slopes.append(slope)
            else:
                add_product_(grad_weight, slope.t(), values, first=part.start == 0)
        if shard is not None:
            waits = [shard.group.sum_(sums) for sums in (loss[None], grad_hidden) if sums is not None]
            for wait in waits:
                wait()
        kept = hidden if slopes else None
        ctx.save_for_backward(kept, grad_hidden, grad_weight, grad_bias, *slopes)
        ctx.grads, ctx.types = grads, (weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, grad_hidden, grad_weight, grad_bias, *slopes = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None and ctx.grads is not None:
            ctx.grads.put_formed(grad_weight, grad_bias, grad)
            grad_weight = grad_bias = None
        elif grad_weight is not None:
            grad_weight = grad_weight * grad.to(grad_weight.dtype)
            grad_bias = None if grad_bias is None else grad_bias * grad.to(grad_bias.dtype)
        if slopes:
            slope = torch.cat(slopes) if len(slopes) > 1 else slopes[0]
            slope = slope * grad.to(slope.dtype)
            values = hidden.detach().to(slope.dtype)  # detached: as in `nn.parallel_layers`
            if ctx.grads is not None:
                ctx.grads.put(values, slope)
            else:
                weight_type, bias_type = ctx.types
                grad_weight = (slope.t() @ values).to(weight_type)
                grad_bias = None if bias_type is None else slope.sum(0, dtype=bias_type)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 9


def _add_losses(
    loss: Tensor, logits: Tensor, goal: Tensor, smoothing: float, shard: VocabShard | None, wants_gradient: bool
) -> Tensor:
    """Adds the cross-entropies of a chunk to `loss`. Returns the gradient of the logits: softmax − targets."""
    even = smoothing / (logits.size(-1) if shard is None else shard.total)  # of each token of the vocabulary
    if shard is None:
        own = logits if logits.dtype == loss.dtype and logits.device.type == "cpu" else None
        # In place: a new matrix would push the logits out of the cache.
        log_probability, hit = torch.log_softmax(logits, -1, dtype=loss.dtype, out=own), None
        loss -= (1 - smoothing) * log_probability.gather(1, goal).sum()
    else:
        log_probability, hit, goal = _local_log_probabilities(logits.to(loss.dtype), goal, shard)
        loss -= (1 - smoothing) * (log_probability.gather(1, goal) * hit).sum()
    if smoothing:
        loss -= even * log_probability.sum()
    if not wants_gradient:
        return log_probability
    slope = log_probability.exp_().sub_(even) if smoothing else log_probability.exp_()
    ones = torch.ones_like(goal, dtype=slope.dtype) if hit is None else hit.to(slope.dtype)
    return slope.scatter_add_(1, goal, (smoothing - 1) * ones)


def _local_log_probabilities(logits: Tensor, goal: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """The log probabilities [N, V'] of the shard's tokens; which targets [N, 1] are among them, and at which index.

    logits [N, V'], goal [N, 1] as numbers of the whole vocabulary. Each rank contributes its largest logit and the sum
    of its exponentials relative to that; the sum over the vocabulary follows from those of all ranks.
    """
    top = logits.amax(-1)
    total = (logits - top[:, None]).exp_().sum(-1)
    tops, totals = shard.group.gather(torch.stack([top, total])).unbind(1)
    highest = tops.amax(0)
    log_total = highest + (totals * (tops - highest).exp_()).sum(0).log_()
    hit, place = local_vocab_index(goal, shard.rows)
    return logits - log_total[:, None], hit, place
