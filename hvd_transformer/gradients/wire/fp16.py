"""Gradients in transit in float16, summed in float16 by Horovod or in float32 by the ranks.

    fp16            × 2^e → float16, summed by Horovod in float16 → × 2^-e; errors are fed back
    fp16_fp32_sum   × 2^e → float16, all-to-all, summed here in float32 → float16, all-gather → × 2^-e

float16 has 11 bits between 6e-5 and 65504 and rounds to zero below 3e-8. Each buffer has a scale 2^e of its own, which
costs no rounding: from the largest gradient that any replica had in the step before, so that the sum over all replicas
overflows only if the largest gradient grows by more than `HEADROOM` in one step. Such a step is skipped, as in loss
scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). The largest gradients of all buffers travel as one
small message behind the last buffer. What has no scale yet, in the first step, travels as it is.

The sum in float16 rounds once per replica. At 512 replicas its relative error is 3e-3 if their gradients are mostly
noise; where they are nearly equal, each addition rounds the same way, and it reaches 3e-2. The sum in float32 is within
3e-4 at any number of replicas (tests/unit/gradients/wire/test_fp16.py). It keeps no errors: nothing per parameter in
memory and checkpoints.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.streams import start_copy
from hvd_transformer.gradients.wire.feedback import FeedbackWire
from hvd_transformer.gradients.wire.plain import InTransit, Layout, WireOptions, chunks

LARGEST = 2.0**15  # scaled sums stay below it; float16 ends at 65504, which leaves room for rounding
HEADROOM = 2.0**6  # by which the largest gradient may grow from one step to the next
_MAX_EXPONENT = 126  # a scale and its inverse are float32 numbers


class Fp16Wire(FeedbackWire):
    """Half precision, with a power of two per buffer as its scale; the collectives sum in float16."""

    format = "fp16"

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        self._exponents: dict[str, int] = {}  # all ranks' largest gradient is below 2^exponent
        self._peaks: dict[str, Tensor] = {}  # this rank's largest gradient in this step
        self._read_peaks: Callable[[], Tensor] | None = None  # all ranks' of the last step, by `layouts`; None: read
        self._overflowed = False

    @property
    def overflowed(self) -> bool:
        self._settle()
        return self._overflowed

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        self._settle()
        super().begin_step(step, total_steps, scale)

    def all_reduce_async(self, gradients: Tensor, name: str) -> InTransit:
        message = self.encode(gradients, name)
        wait = self.sum_async(message, name)
        return InTransit(message.nbytes, lambda: self.decode(wait(), name))

    def reduce_scatter_async(self, gradients: Tensor, name: str) -> InTransit:
        message = self.encode(gradients, name)
        wait = self.sum_part_async(message, name)
        return InTransit(message.nbytes, lambda: self.decode(wait(), name))

    def all_gather_async(self, rows: Tensor, name: str) -> InTransit:
        message = self.encode(rows.flatten(), name).view(rows.shape)
        wait = self.group.all_gather_async(message, f"{name}.rows")
        return InTransit(message.nbytes, lambda: self.decode(wait(), name))

    def sum_async(self, message: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to sum an encoded message over the ranks."""
        return self.group.all_reduce_async_(message, name)

    def sum_part_async(self, message: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to sum an encoded message over the ranks; the function returned waits for this rank's part."""
        return self.group.reduce_scatter_async(message, name)

    def encode(self, gradients: Tensor, name: str) -> Tensor:
        """The message for a 1-D tensor: of the same length, or the tensor itself if there is no scale yet."""
        error, peaks = self.errors.get(name), []
        scale = self._scale(name) if name in self._exponents else None
        message = gradients if scale is None else torch.empty_like(gradients, dtype=torch.float16)
        for chunk in chunks(gradients):
            values = gradients[chunk]
            if scale is not None:
                if error is not None:
                    values = values + error[chunk]
                torch.mul(values, scale, out=message[chunk])
                if error is not None:
                    sent = error[chunk].copy_(message[chunk])
                    torch.sub(values, sent, alpha=1 / scale, out=sent)
            peaks.append(values.abs().amax())
        if peaks:
            self._peaks[name] = torch.stack([*peaks, self._peaks.get(name, peaks[0])]).amax()
        return message

    def decode(self, received: Tensor, name: str) -> Tensor:
        """The gradients, or their sum, from what was received."""
        return received.float().mul_(1 / self._scale(name)) if name in self._exponents else received

    def finish_sending(self) -> None:
        super().finish_sending()
        device = next(iter(self.layouts.values())).values.device  # that of the first stage
        nothing = torch.zeros((), device=device)
        peaks = torch.stack([self._peaks.get(name, nothing).to(device, non_blocking=True) for name in self.layouts])
        self._peaks.clear()
        peaks = peaks.double().nan_to_num_(nan=math.inf, posinf=math.inf)
        self._wait_peaks = self.group.all_reduce_async_(peaks, "wire.peaks", "max")

    def end_step(self) -> None:
        self._read_peaks = start_copy(self._wait_peaks())

    def _settle(self) -> None:
        """Take what the last step's peaks say: only when it is asked for, so that the host does not wait for a GPU."""
        if self._read_peaks is None:
            return
        read, self._read_peaks = self._read_peaks, None
        peaks = dict(zip(self.layouts, read().tolist(), strict=True))
        most = {name: peaks[name] * self.group.size * self._scale(name) for name in self._exponents}
        self._overflowed = max(peaks.values()) < math.inf and max(most.values(), default=0.0) > LARGEST
        for name, peak in peaks.items():
            if 0 < peak < math.inf:
                found = math.frexp(peak)[1]
                # It falls slowly: the step after one of few samples has large gradients again.
                self._exponents[name] = max(found, self._exponents.get(name, found) - 1)

    def state(self) -> dict[str, Any]:
        self._settle()
        sizes = {name: layout.values.numel() for name, layout in self.layouts.items()}
        exponents = {f"{name}/{sizes[name]}": exponent for name, exponent in self._exponents.items()}
        return {**super().state(), "exponents": exponents}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._read_peaks = None
        exponents = state.get("exponents", {} if "format" in state else state)  # older checkpoints have these alone
        keys = {f"{name}/{layout.values.numel()}": name for name, layout in self.layouts.items()}
        known = exponents.keys() <= keys.keys()
        self._exponents = {keys[key]: exponent for key, exponent in exponents.items()} if known else {}

    def _scale(self, name: str) -> float:
        room = int(math.log2(LARGEST / HEADROOM)) - math.ceil(math.log2(self.group.size))
        return math.ldexp(1.0, max(-_MAX_EXPONENT, min(_MAX_EXPONENT, room - self._exponents[name])))


class Fp16Fp32SumWire(Fp16Wire):
    """Half precision in transit only: each rank sums its part of all ranks' gradients in float32, in rank order.

    As many bytes as a ring allreduce. An allreduce is an all-to-all and an all-gather; the second one begins when the
    last buffer is sent.
    """

    format = "fp16_fp32_sum"

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        self.errors = {}

    def sum_async(self, message: Tensor, name: str) -> Callable[[], Tensor]:
        length, size = message.numel(), self.group.size
        summed = self.sum_part_async(F.pad(message, (0, -length % size)), name)
        gather = self._when_sent(lambda: self.group.all_gather_async(summed().to(message.dtype), f"{name}.sums"))
        return lambda: gather()()[:length]

    def sum_part_async(self, message: Tensor, name: str) -> Callable[[], Tensor]:
        wait, size = self.group.all_to_all_async(message, f"{name}.parts"), self.group.size
        dtype = torch.promote_types(message.dtype, torch.float32)
        return lambda: wait()[0].view(size, -1).sum(0, dtype=dtype)
