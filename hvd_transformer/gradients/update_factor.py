"""What an update multiplies the gradients by, on the device: the host queues the update before it reads norm and loss.

device   | backward | norm, factor | update          | next forward
host      queues …   queues …       queues, reads norm, loss, counts, queues …
"""

from typing import NamedTuple

import torch
from torch import Tensor


class UpdateFactor(NamedTuple):
    """Scalars on one device: `divisor`, float32, of the gradients; `skip` is 1 where there is nothing to update by, and
    otherwise 0."""

    divisor: Tensor
    skip: Tensor

    def to(self, device: torch.device) -> "UpdateFactor":
        """A copy on another device."""
        return UpdateFactor(self.divisor.to(device, non_blocking=True), self.skip.to(device, non_blocking=True))


def update_factor(of_mean: Tensor, norm: Tensor, good: Tensor, clip_norm: float | None) -> UpdateFactor:
    """For gradients of this norm: × `of_mean`, float64, and clipped; an update if they are finite and `good`.

    The arithmetic is the host's (`optimizer.clip_factor`), and so are the results, bit for bit.
    """
    norm = norm.to(of_mean.device, torch.float64) * of_mean
    factor = of_mean if clip_norm is None else of_mean * (clip_norm / (norm + 1e-6)).clamp(max=1)
    return UpdateFactor((1 / factor).float(), (~(good & norm.isfinite())).float())
