"""Error feedback: what a format's rounding loses in one step is added to the gradients of the next one.

Over any number of steps, what the ranks received differs from the sum of their gradients by the last step's errors only
(Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, arXiv 1901.09847).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.wire.plain import Layout, Wire, WireOptions

ERROR = "error."


class FeedbackWire(Wire):
    """Keeps this rank's errors: a number per parameter, like the gradient buffers and as they are scaled."""

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        self.errors = {name: torch.zeros_like(layout.values) for name, layout in self.layouts.items() if layout.slots}
        self._scale_of_errors: float | None = None

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        if self._scale_of_errors not in (None, scale):  # loss scaling has changed it, by a power of two
            for error in self.errors.values():
                error.mul_(scale / self._scale_of_errors)
        self._scale_of_errors = scale

    def skip_step(self) -> None:
        for error in self.errors.values():
            error.zero_()

    def state(self) -> dict[str, Any]:
        return {"format": self.format, "scale": self._scale_of_errors}

    def load(self, state: Mapping[str, Any]) -> None:
        self._scale_of_errors = state.get("scale")

    def tensors(self) -> dict[str, Tensor]:
        return {
            ERROR + slot.name: error[slot.start : slot.stop]
            for name, error in self.errors.items()
            for slot in self.layouts[name].slots
        }
