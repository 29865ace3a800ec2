"""Cross-entropy of a vocabulary projection, computed in chunks so that the full logits never exist at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tokens a chunk. On a CPU the logits should stay below the 32 MiB from where on glibc takes each block anew from the
# kernel, page by page: that is a tenth of a step. A GPU wants large matrices.
CPU_CHUNK, GPU_CHUNK = 256, 4096


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int | None = None
) -> Tensor:
    """Sum over tokens of the cross-entropy of `hidden @ weight.T + bias`.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] → scalar in float32 or wider. Holds the logits
    of `chunk` tokens (None: a good number for the device) at a time, forward and backward: the gradients are
    formed beside the loss, so the logits are computed once (the idea of Liger-Kernel's fused linear cross-entropy,
    arXiv 2410.10989, section 3.2).
    """
    chunk = chunk or (CPU_CHUNK if hidden.device.type == "cpu" else GPU_CHUNK)
    # Inside `forward` gradients look wanted also under no_grad: evaluation would form them in vain.
    wants = torch.is_grad_enabled()
    loss: Tensor = _ProjectedCrossEntropy.apply(hidden, weight, bias, targets, chunk, wants)  # type: ignore[no-untyped-call]
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, wants: bool
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=torch.promote_types(wide, weight.dtype), device=hidden.device)
        wants_gradient = wants and any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_weight = torch.zeros_like(weight) if wants_gradient else None
        grad_bias = torch.zeros_like(bias) if wants_gradient and bias is not None else None
        for start in range(0, hidden.size(0), chunk):
            part, goal = hidden[start : start + chunk], targets[start : start + chunk, None]
            logits = F.linear(part, weight, bias)
            log_probability = F.log_softmax(logits, dim=-1, dtype=loss.dtype)
            loss -= log_probability.gather(1, goal).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # The gradient of the logits: softmax − one-hot.
            slope = log_probability.exp_()
            slope.scatter_add_(1, goal, torch.full_like(goal, -1, dtype=slope.dtype))
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(logits.dtype)
            grad_hidden[start : start + chunk] = slope @ weight.to(logits.dtype)
            if grad_weight.dtype == slope.dtype:
                grad_weight.addmm_(slope.t(), part)
            else:
                grad_weight += slope.t() @ part.to(logits.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*grads, None, None, None)
