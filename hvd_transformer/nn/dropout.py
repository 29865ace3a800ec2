"""Dropout whose random numbers depend only on its place in the job: seed, epoch, samples, layer.

torch has one generator per device: pipeline stages that run side by side would draw from it in any order. Here each
call seeds its own generator, so a run repeats bit for bit whatever the partition and the timing, a recomputed layer
drops the same values, and a checkpoint has no random state to keep. On a GPU backward draws the mask again: it is not
stored.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.nn.kernels import DropoutBits, FusibleLayer, dropout_threshold
from hvd_transformer.nn.planned import on_gpu


class _Here(threading.local):
    """The place that this thread computes now, and its generators."""

    place: tuple[int, ...] | None = None

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}


_here = _Here()


@contextmanager
def dropout_key(*place: int) -> Iterator[None]:
    """Inside, this thread computes for this place in the job, such as (seed, epoch, first sample)."""
    before, _here.place = _here.place, place
    try:
        yield
    finally:
        _here.place = before


@contextmanager
def torch_dropout_key(device: torch.device) -> Iterator[None]:
    """For modules that draw from torch's own generators: seeds them by the place, and restores them afterwards."""
    if _here.place is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_seed(_here.place))
        yield


def _seed(place: tuple[int, ...], *key: int) -> int:
    (seed,) = np.random.SeedSequence(place, spawn_key=key).generate_state(1, np.uint64)
    return int(seed) & (2**63 - 1)


class Dropout(FusibleLayer):
    """Sets values to zero with probability `rate` while training, and scales the others by 1 / (1 - rate).

    Outside of a `dropout_key` it draws from torch's own generator. `number` tells the dropouts of a model apart. A
    `sharded` dropout sees one piece of the values on each rank of a tensor group; `share` is the rank's piece.

    `key` has both numbers as a tensor on the CPU, for compiled graphs, which all blocks of a model then share.
    """

    key: Tensor

    def __init__(self, rate: float, *, sharded: bool = False) -> None:
        super().__init__()
        self.rate, self.sharded = rate, sharded
        self.number = self.share = 0

    @property
    def active(self) -> bool:
        """Whether values are dropped now."""
        return self.training and self.rate > 0

    def forward(self, values: Tensor, residual: Tensor | None = None) -> Tensor:
        """`values` after dropout; with a `residual` of the same shape, their sum."""
        if self.active and self.kernels is not None and self.kernels.fit(values, residual):
            return self.kernels.dropout(values, self.draw_bits(values.shape), residual)
        dropped = self._drop(values) if self.active else values
        return dropped if residual is None else residual + dropped

    def draw_bits(self, shape: Sequence[int]) -> DropoutBits:
        """The random bits for values of this shape, which a kernel turns into dropout. Needs `kernels`."""
        assert self.kernels is not None
        return self.kernels.draw(shape, self.rate, self.seed())

    def seed(self) -> int:
        """The seed of this thread's place for this dropout; outside of a place, one of torch's own generator."""
        return seed_here(self.number, self.share)

    def _drop(self, values: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            compiled: Tensor = torch.ops.hvd_transformer.dropout(values, self.key, self.rate)[0]
            return compiled
        if _here.place is None:
            return F.dropout(values, self.rate)
        if not on_gpu(values):
            mask: Tensor = _cpu_mask(values.detach(), self.rate, self.seed())
            return values * mask
        result: Tensor = _Seeded.apply(values, self.rate, self.seed())  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"rate={self.rate}, number={self.number}"


def seed_here(number: int, share: int) -> int:
    """The seed of this thread's place for a dropout with these numbers; outside of a place a random one."""
    if _here.place is None:
        return int(torch.randint(2**63 - 1, ()))
    return _seed((*_here.place, number), *([share] if share else []))


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rate: float, seed: int) -> Tensor:
        ctx.rate, ctx.seed = rate, seed
        return dropped(values, rate, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return dropped(grad, ctx.rate, ctx.seed), None, None


def dropped(values: Tensor, rate: float, seed: int) -> Tensor:
    """`values` after dropout by the seed: the same for any memory layout of the values."""
    device, generators = values.device, _here.generators
    if device not in generators:
        generators[device] = torch.Generator(device)
    kept = torch.empty(values.shape, dtype=torch.bool, device=device)
    kept.bernoulli_(1 - rate, generator=generators[device].manual_seed(seed))
    result: Tensor = torch.ops.aten.native_dropout_backward(values, kept, 1 / (1 - rate))  # values × kept × scale
    return result


@torch.library.custom_op("hvd_transformer::dropout_mask", mutates_args=())
def _cpu_mask(like: Tensor, rate: float, seed: int) -> Tensor:
    """Zeros, and the factor that keeps the mean.

    It uses 16 random bits per value, which is six times as fast as torch's generator: see `DropoutBits`.
    """
    least, scale = dropout_threshold(rate)
    count = like.numel()
    bits = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.int16)[:count]
    # numpy's comparison, and torch's conversion from bytes: each is several times as fast as the other's.
    kept = torch.from_numpy(np.greater_equal(bits, np.int16(least)).view(np.uint8))
    return kept.view(like.shape).to(like.dtype).mul_(scale)


@_cpu_mask.register_fake
def _(like: Tensor, rate: float, seed: int) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def number_dropouts(model: nn.Module) -> None:
    """Number a model's dropouts in its own order. Call once, when the model is complete."""
    for number, module in enumerate(module for module in model.modules() if isinstance(module, Dropout)):
        module.number = number
