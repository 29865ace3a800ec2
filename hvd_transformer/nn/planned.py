"""What `plan` tells layers, which it runs on fake tensors of the CPU: the device, and how much of a loop is enough."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

Purpose = Literal["results", "memory", "flops"]

_on_gpu = False
_purpose: Purpose = "results"


def on_gpu(tensor: Tensor) -> bool:
    """Whether this tensor is on a GPU, or stands for one that is."""
    return _on_gpu or tensor.is_cuda


def chunks(size: int, chunk: int, *, sums: bool) -> Sequence[slice]:
    """The chunks of a loop over `size` elements, `chunk` at a time.

    In a plan fewer, so that its time does not grow with the batch: all elements at once for their FLOPs; for their
    memory the first two, in the second of which the first one's tensors are still there, if the loop only `sums`, so
    that it holds no more later.
    """
    if _purpose == "flops":
        return (slice(0, size),)
    starts = range(0, size, chunk)
    return [slice(start, start + chunk) for start in (starts[:2] if _purpose == "memory" and sums else starts)]


@contextmanager
def planned_on_gpu(active: bool = True) -> Iterator[None]:
    """Inside, all tensors stand for those of a GPU, if `active`. For one thread at a time."""
    global _on_gpu
    before, _on_gpu = _on_gpu, active
    try:
        yield
    finally:
        _on_gpu = before


@contextmanager
def planned_for(purpose: Purpose) -> Iterator[None]:
    """Inside, layers run for this purpose only, and their results are wrong. For one thread at a time."""
    global _purpose
    before, _purpose = _purpose, purpose
    try:
        yield
    finally:
        _purpose = before
