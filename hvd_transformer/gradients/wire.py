"""The wire: the number format in which gradients travel between replicas, and where they are summed.

    communication.compression
    none            the buffers' own format, summed by Horovod in that format
    fp16            × 2^e → float16, summed by Horovod in float16 → × 2^-e
    fp16_fp32_sum   × 2^e → float16, all-to-all, summed here in float32 → float16, all-gather → × 2^-e

float16 has 11 bits between 6e-5 and 65504 and rounds to zero below 3e-8. Each bucket has a scale 2^e of its own, which
costs no rounding: from the largest gradient that any replica had in the step before, so that the sum over all replicas
overflows only if the largest gradient grows by more than `HEADROOM` in one step. Such a step is skipped, as in loss
scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). The largest gradients of all buckets travel as one
small message behind the last bucket. What has no scale yet, in the first step, travels as it is.

The sum in float16 rounds once per replica. At 512 replicas its relative error is 3e-3 if their gradients are mostly
noise; where they are nearly equal, each addition rounds the same way, and it reaches 3e-2. The sum in float32 is within
3e-4 at any number of replicas (tests/unit/gradients/test_wire.py).

Other formats derive from `Wire` and are named in `make_wire`.
"""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hvd_transformer.comm.group import Group

Result = TypeVar("Result")
LARGEST = 2.0**15  # scaled sums stay below it; float16 ends at 65504, which leaves room for rounding
HEADROOM = 2.0**6  # by which the largest gradient may grow from one step to the next
_MAX_EXPONENT = 126  # a scale and its inverse are float32 numbers


class Wire:
    """Sends gradients as they are; the base of the other formats.

    `sizes` has the number of values behind each name that is sent. In a step, each gradient goes through `encode`, a
    collective and `decode`; `finish_sending` follows the last collective's start, `end_step` the last `decode`.
    """

    overflowed = False  # in the last step a sum may have overflowed because of the format, not because it diverged

    def __init__(self, group: Group, sizes: Mapping[str, int]) -> None:
        self.group, self.sizes = group, dict(sizes)

    def encode(self, gradients: Tensor, name: str) -> Tensor:
        """What to send for `gradients`: a tensor of the same shape, perhaps the same tensor."""
        return gradients

    def decode(self, received: Tensor, name: str) -> Tensor:
        """The gradients, or their sum, from what was received."""
        return received

    def all_reduce_async(self, encoded: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to sum a 1-D tensor over the ranks; the function returned waits for the sum. May change the tensor."""
        return self.group.all_reduce_async_(encoded, name)

    def reduce_scatter_async(self, encoded: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to sum a 1-D tensor over the ranks; the function returned waits for this rank's equal part of it."""
        return self.group.reduce_scatter_async(encoded, name)

    def finish_sending(self) -> None:
        """Everything of this step is on its way: start what had to wait for that. It may wait for other ranks."""

    def end_step(self) -> None:
        """Everything of this step is decoded."""

    def state(self) -> dict[str, int]:
        """What the next step depends on, for a checkpoint; the same on all ranks of the group."""
        return {}

    def load(self, state: Mapping[str, int]) -> None:
        """Restore the state. Ignores that of other buckets: the first step then travels as it is."""


class Fp16Wire(Wire):
    """Half precision, with a power of two per bucket as its scale; the collectives sum in float16."""

    def __init__(self, group: Group, sizes: Mapping[str, int]) -> None:
        super().__init__(group, sizes)
        self._exponents: dict[str, int] = {}  # all ranks' largest gradient is below 2^exponent
        self._peaks: dict[str, Tensor] = {}  # this rank's largest gradient in this step

    def encode(self, gradients: Tensor, name: str) -> Tensor:
        if gradients.numel():
            peak = torch.linalg.vector_norm(gradients, math.inf)
            self._peaks[name] = torch.maximum(self._peaks[name], peak) if name in self._peaks else peak
        if name not in self._exponents:
            return gradients
        return torch.mul(gradients, self._scale(name), out=torch.empty_like(gradients, dtype=torch.float16))

    def decode(self, received: Tensor, name: str) -> Tensor:
        return received.float().mul_(1 / self._scale(name)) if name in self._exponents else received

    def finish_sending(self) -> None:
        nothing = torch.zeros(())
        peaks = torch.stack([self._peaks.get(name, nothing).to("cpu", torch.float64) for name in self.sizes])
        self._peaks.clear()
        peaks.nan_to_num_(nan=math.inf, posinf=math.inf)
        self._wait_peaks = self.group.all_reduce_async_(peaks, "wire.peaks", "max")

    def end_step(self) -> None:
        peaks = dict(zip(self.sizes, self._wait_peaks().tolist(), strict=True))
        most = {name: peaks[name] * self.group.size * self._scale(name) for name in self._exponents}
        self.overflowed = max(peaks.values()) < math.inf and max(most.values(), default=0.0) > LARGEST
        for name, peak in peaks.items():
            if 0 < peak < math.inf:
                found = math.frexp(peak)[1]
                # It falls slowly: the step after one of few samples has large gradients again.
                self._exponents[name] = max(found, self._exponents.get(name, found) - 1)

    def state(self) -> dict[str, int]:
        return {f"{name}/{self.sizes[name]}": exponent for name, exponent in self._exponents.items()}

    def load(self, state: Mapping[str, int]) -> None:
        keys = {f"{name}/{size}": name for name, size in self.sizes.items()}
        self._exponents = (
            {keys[key]: exponent for key, exponent in state.items()} if state.keys() <= keys.keys() else {}
        )

    def _scale(self, name: str) -> float:
        room = int(math.log2(LARGEST / HEADROOM)) - math.ceil(math.log2(self.group.size))
        return math.ldexp(1.0, max(-_MAX_EXPONENT, min(_MAX_EXPONENT, room - self._exponents[name])))


class Fp16Fp32SumWire(Fp16Wire):
    """Half precision in transit only: each rank sums its part of all ranks' gradients in float32, in rank order.

    As many bytes as a ring allreduce. An allreduce is an all-to-all and an all-gather; the second one begins when the
    last bucket is sent.
    """

    def __init__(self, group: Group, sizes: Mapping[str, int]) -> None:
        super().__init__(group, sizes)
        self._gathers: list[_Once[Callable[[], Tensor]]] = []

    def all_reduce_async(self, encoded: Tensor, name: str) -> Callable[[], Tensor]:
        length, size = encoded.numel(), self.group.size
        summed = self.reduce_scatter_async(F.pad(encoded, (0, -length % size)), name)
        gather = _Once(lambda: self.group.all_gather_async(summed().to(encoded.dtype), f"{name}.sums"))
        self._gathers.append(gather)
        return lambda: gather()()[:length]

    def reduce_scatter_async(self, encoded: Tensor, name: str) -> Callable[[], Tensor]:
        wait, size = self.group.all_to_all_async(encoded, f"{name}.parts"), self.group.size
        dtype = torch.promote_types(encoded.dtype, torch.float32)
        return lambda: wait()[0].view(size, -1).sum(0, dtype=dtype)

    def finish_sending(self) -> None:
        super().finish_sending()
        gathers, self._gathers = self._gathers, []
        for gather in gathers:
            gather()


class _Once(Generic[Result]):
    """Calls a function once, whichever thread comes first; later calls have the same result."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function, self._lock = function, threading.Lock()
        self._result: list[Result] = []

    def __call__(self) -> Result:
        with self._lock:
            if not self._result:
                self._result.append(self._function())
            return self._result[0]


def make_wire(compression: str, group: Group, sizes: Mapping[str, int]) -> Wire:
    """The format of `communication.compression`; a single rank sends nothing."""
    formats = {"none": Wire, "fp16": Fp16Wire, "fp16_fp32_sum": Fp16Fp32SumWire}
    return (Wire if group.size == 1 else formats[compression])(group, sizes)
