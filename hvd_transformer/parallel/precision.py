"""Mixed precision: autocast of forward passes, and loss scaling for float16."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16", "fp64"]


def weight_dtype(precision: Precision) -> torch.dtype:
    """The number format of weights, gradients and optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


def product_dtype(precision: Precision) -> torch.dtype:
    """The number format of matrix products in mixed precision."""
    return torch.bfloat16 if precision == "bf16" else torch.float16


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward passes: matrix products in bfloat16 or float16 where `precision` says so."""
    if precision in ("fp32", "fp64"):
        return nullcontext()
    return torch.autocast(device.type, product_dtype(precision))


class LossScaler:
    """The factor that keeps float16 gradients off zero (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    It is halved when a gradient overflows (that step is skipped) and doubled after `patience` good steps. All ranks
    see the same reduced gradients, so all have the same factor. For other precisions it is 1.
    """

    def __init__(self, precision: Precision, patience: int = 2000) -> None:
        self.active = precision == "fp16"
        self.scale = 2.0**16 if self.active else 1.0
        self.patience = patience
        self.good_steps = 0

    def good(self) -> None:
        """Count a step whose gradients were finite."""
        self.good_steps += 1
        if self.active and self.good_steps % self.patience == 0:
            self.scale *= 2

    def overflowed(self) -> bool:
        """Halve the factor after a step whose gradients were not finite. Returns False if that cannot help."""
        if not self.active or self.scale <= 1:
            return False
        self.scale, self.good_steps = max(1.0, self.scale / 2), 0
        return True

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float]) -> None:
        if self.active:
            self.scale, self.good_steps = state["scale"], int(state["good_steps"])
