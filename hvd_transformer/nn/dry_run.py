"""Dry runs of layers on fake CPU tensors, as `plan` makes them: which device to assume, and how many chunks to run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

Purpose = Literal["results", "memory", "flops"]

_assumes_gpu = False
_purpose: Purpose = "results"


def on_gpu(tensor: Tensor) -> bool:
    """Whether this tensor is on a GPU; inside `assume_gpu` always true."""
    return _assumes_gpu or tensor.is_cuda


def chunks(size: int, chunk: int, *, accumulates: bool) -> Sequence[slice]:
    """The chunks of a loop over `size` elements, `chunk` at a time.

    A dry run returns fewer, so that its time does not grow with the batch. FLOPs need one chunk with all elements.
    Memory needs the first two if the loop only `accumulates` sums: the peak is reached in the second chunk, where
    tensors of the first one are still alive, and later chunks hold no more.
    """
    if _purpose == "flops":
        return (slice(0, size),)
    starts = range(0, size, chunk)
    return [slice(start, start + chunk) for start in (starts[:2] if _purpose == "memory" and accumulates else starts)]


@contextmanager
def assume_gpu(active: bool = True) -> Iterator[None]:
    """Treat all tensors inside as tensors on a GPU, if `active`. Not thread-safe."""
    global _assumes_gpu
    before, _assumes_gpu = _assumes_gpu, active
    try:
        yield
    finally:
        _assumes_gpu = before


@contextmanager
def dry_run(purpose: Purpose) -> Iterator[None]:
    """Run layers inside only to measure `purpose`: their results are wrong. Not thread-safe."""
    global _purpose
    before, _purpose = _purpose, purpose
    try:
        yield
    finally:
        _purpose = before
