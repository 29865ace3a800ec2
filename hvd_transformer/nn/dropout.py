"""Dropout whose random numbers depend only on a key: the job's seed, the epoch, the samples, and the layer.

torch has one generator per device, from which pipeline stages in threads would draw in any order. Here each call seeds
its own generator. So a run repeats bit for bit whatever the partition and the timing, a recomputed layer drops the same
values, and a checkpoint has no random state to save. On a GPU the mask is not stored: backward draws it again.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.nn.dry_run import on_gpu
from hvd_transformer.nn.kernels import DropoutBits, FusibleLayer, dropout_threshold


class _ThreadState(threading.local):
    """The dropout key of what this thread computes now, and its generators."""

    key: tuple[int, ...] | None = None

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}


_thread = _ThreadState()


@contextmanager
def dropout_key(*key: int) -> Iterator[None]:
    """Set this thread's dropout key inside, such as (seed, epoch, first sample)."""
    before, _thread.key = _thread.key, key
    try:
        yield
    finally:
        _thread.key = before


@contextmanager
def torch_dropout_key(device: torch.device) -> Iterator[None]:
    """Seed torch's own generators by the dropout key, for modules that draw from them; restores them afterwards."""
    if _thread.key is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_seed(_thread.key))
        yield


def _seed(key: tuple[int, ...], *spawn_key: int) -> int:
    (seed,) = np.random.SeedSequence(key, spawn_key=spawn_key).generate_state(1, np.uint64)
    return int(seed) & (2**63 - 1)


class Dropout(FusibleLayer):
    """Sets values to zero with probability `rate` while training, and scales the others by 1 / (1 - rate).

    Outside of a `dropout_key` it draws from torch's own generator. `number` tells the dropouts of a model apart. A
    `sharded` dropout sees one shard of the values on each rank of a tensor group; `shard_index` is the rank's shard.

    `key` has both numbers as a tensor on the CPU, for compiled graphs, which all blocks of a model then share.
    """

    key: Tensor

    def __init__(self, rate: float, *, sharded: bool = False) -> None:
        super().__init__()
        self.rate, self.sharded = rate, sharded
        self.number = self.shard_index = 0

    @property
    def active(self) -> bool:
        """Whether values are dropped now."""
        return self.training and self.rate > 0

    def forward(self, values: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply dropout to `values`, and add the `residual` of the same shape if it is given."""
        if self.active and self.kernels is not None and self.kernels.fit(values, residual):
            return self.kernels.dropout(values, self.draw_bits(values.shape), residual)
        dropped = self._drop(values) if self.active else values
        return dropped if residual is None else residual + dropped

    def draw_bits(self, shape: Sequence[int]) -> DropoutBits:
        """Draw the random bits for values of this shape, which a kernel turns into dropout. Needs `kernels`."""
        assert self.kernels is not None
        return self.kernels.draw(shape, self.rate, self.seed())

    def seed(self) -> int:
        """The seed of this dropout under this thread's dropout key; without a key, one from torch's own generator."""
        return current_seed(self.number, self.shard_index)

    def _drop(self, values: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            compiled: Tensor = torch.ops.hvd_transformer.dropout(values, self.key, self.rate)[0]
            return compiled
        if _thread.key is None:
            return F.dropout(values, self.rate)
        if not on_gpu(values):
            mask: Tensor = _cpu_mask(values.detach(), self.rate, self.seed())
            return values * mask
        result: Tensor = _SeededDropout.apply(values, self.rate, self.seed())  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"rate={self.rate}, number={self.number}"


def current_seed(number: int, shard_index: int) -> int:
    """The seed of a dropout with these numbers under this thread's dropout key; without a key a random one."""
    if _thread.key is None:
        return int(torch.randint(2**63 - 1, ()))
    return _seed((*_thread.key, number), *([shard_index] if shard_index else []))


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rate: float, seed: int) -> Tensor:
        ctx.rate, ctx.seed = rate, seed
        return seeded_dropout(values, rate, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return seeded_dropout(grad, ctx.rate, ctx.seed), None, None


def seeded_dropout(values: Tensor, rate: float, seed: int) -> Tensor:
    """Apply dropout with a mask drawn from the seed, which is the same for any memory layout of `values`."""
    device, generators = values.device, _thread.generators
    if device not in generators:
        generators[device] = torch.Generator(device)
    kept = torch.empty(values.shape, dtype=torch.bool, device=device)
    kept.bernoulli_(1 - rate, generator=generators[device].manual_seed(seed))
    result: Tensor = torch.ops.aten.native_dropout_backward(values, kept, 1 / (1 - rate))  # values × kept × scale
    return result


@torch.library.custom_op("hvd_transformer::dropout_mask", mutates_args=())
def _cpu_mask(like: Tensor, rate: float, seed: int) -> Tensor:
    """Draw the mask to multiply values by: 0 where they are dropped, elsewhere 1 / (1 - rate), for the rate
    rounded to 65,536ths, to keep the mean.

    It uses 16 random bits per value, which is six times as fast as torch's generator: see `DropoutBits`.
    """
    threshold, scale = dropout_threshold(rate)
    count = like.numel()
    bits = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.int16)[:count]
    # numpy's comparison, and torch's conversion from bytes: each is several times as fast as the other's.
    kept = torch.from_numpy(np.greater_equal(bits, np.int16(threshold)).view(np.uint8))
    return kept.view(like.shape).to(like.dtype).mul_(scale)


@_cpu_mask.register_fake
def _(like: Tensor, rate: float, seed: int) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def number_dropouts(model: nn.Module) -> None:
    """Number the dropouts of a model in the order of its modules. Call once, when the model is complete."""
    for number, module in enumerate(module for module in model.modules() if isinstance(module, Dropout)):
        module.number = number
