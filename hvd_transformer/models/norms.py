"""Normalization of the residual stream, and of the queries and keys of a head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.nn.contracts import TensorGroup
from hvd_transformer.nn.kernels import FusibleLayer
from hvd_transformer.nn.parallel_layers import copy_to_tensor_group


class FusibleNorm(FusibleLayer):
    """A norm of vectors [..., D], which is a fused kernel in compiled training."""

    weight: Any  # a parameter
    bias: Any  # a parameter or None
    eps: Any  # a number
    centers: bool

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        fused = self._fused(hidden)
        normed: Tensor = super().forward(hidden) if fused is None else fused[0]
        return normed

    def fork(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `hidden`, and `hidden` for the residual connection around what takes the norm."""
        return self._fused(hidden) or (self(hidden), hidden)

    def _fused(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.training or self.kernels is None or not self.kernels.fit(hidden, self.weight, self.bias):
            return None
        return self.kernels.norm(hidden, self.weight, self.bias, self.eps, centers=self.centers)


class LayerNorm(FusibleNorm, nn.LayerNorm):
    """Ba et al. 2016, arXiv 1607.06450."""

    centers = True


class RMSNorm(FusibleNorm, nn.RMSNorm):
    """Root mean square norm: Zhang and Sennrich 2019, arXiv 1910.07467."""

    bias, centers = None, False


def make_norm(config: ModelConfig) -> FusibleNorm:
    """The norm of vectors [..., D] that the configuration names."""
    if config.norm_type == "rms":
        return RMSNorm(config.d_model, config.norm_eps)
    return LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


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
