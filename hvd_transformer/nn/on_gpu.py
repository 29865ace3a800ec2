"""Whether a layer computes as on a GPU: on one, or in `plan`, which runs a GPU's layers on fake tensors of the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_planned = False


def on_gpu(tensor: Tensor) -> bool:
    """Whether this tensor is on a GPU, or stands for one that is."""
    return _planned or tensor.is_cuda


@contextmanager
def planned_on_gpu(active: bool = True) -> Iterator[None]:
    """Inside, all tensors stand for those of a GPU, if `active`. For one thread at a time."""
    global _planned
    before, _planned = _planned, active
    try:
        yield
    finally:
        _planned = before
