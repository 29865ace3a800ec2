"""Normalization of the residual stream, and of the queries and keys of a head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.nn.contracts import TensorGroup
from hvd_transformer.nn.parallel_layers import copy_to_tensor_group


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of vectors [..., D] that the configuration names: layer norm (Ba et al. 2016, arXiv 1607.06450) or root
    mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    if config.norm_type == "rms":
        return nn.RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


def make_last_norm(config: ModelConfig) -> nn.Module:
    """The norm after the last block, which post-norm models do not have."""
    return make_norm(config) if config.norm == "pre" else nn.Identity()


class HeadNorm(nn.Module):
    """Root mean square norm of each head [..., W], all with one weight [W] (Dehghani et al. 2023, arXiv 2302.05442,
    section 2). The ranks of a tensor group have some of the heads each, and add up the weight's gradients."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, heads: Tensor, group: TensorGroup | None) -> Tensor:
        weight = self.weight if group is None else copy_to_tensor_group(self.weight, group)
        return F.rms_norm(heads, weight.shape, weight, self.eps)
