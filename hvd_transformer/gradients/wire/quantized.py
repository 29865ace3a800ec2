"""Gradients in transit in 8 or 4 bits: blocks of values with one float32 scale each.

    int8   blocks of 256, stochastic rounding        1.02 bytes per value
    int4   blocks of 128, rounding to the nearest    0.53 bytes per value

    2 ranks    encode → all-gather → each rank decodes and sums
    more       encode parts → all-to-all → each rank sums its part in float32 → encode → all-gather → decode

What rounding loses is fed back, the loss of the encoded sum by the rank that encoded it. Stochastic rounding is
unbiased by itself: 3.3 becomes 4 with probability 0.3. Rounding to the nearest level is not, but loses half as much,
and over the steps feedback makes up for it. Horovod never sums such numbers, which would overflow.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.wire.blocks import BlockCodec, Dither, Noise
from hvd_transformer.gradients.wire.feedback import FeedbackWire
from hvd_transformer.gradients.wire.plain import InTransit, Layout, WireOptions


class Int8Wire(FeedbackWire):
    """8 bits per value; the ranks sum what they have received, in float32 and in rank order.

    A rank's rounding depends on the seed, the step, its rank and the first parameter of the buffer, so that a run
    repeats bit for bit.
    """

    format = "int8"
    bits, block, stochastic = 8, 256, True

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        self._codec, self._noise, self._step = BlockCodec(self.bits, self.block), Noise(self.options.seed), 0
        self._num_sent: dict[str, int] = {}  # in this step

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        super().begin_step(step, total_steps, scale)
        self._step = step
        self._num_sent.clear()

    def all_reduce_async(self, gradients: Tensor, name: str) -> InTransit:
        size, dither = self.group.size, self._dither(name)
        if size == 2:
            message = self._encode(gradients, name, [slice(0, gradients.numel())], dither)
            wait = self.group.all_gather_async(message, name)
            return InTransit(message.nbytes, lambda: self._codec.decode_sum(list(wait()), gradients))
        length = -(-gradients.numel() // (size * self.block)) * self.block
        parts = [slice(rank * length, (rank + 1) * length) for rank in range(size)]
        message = self._encode(gradients, name, parts, dither)
        own = parts[self.group.rank]
        summed = self._sum_async(message, name, torch.empty_like(gradients[own]))
        gather = self._when_sent(lambda: self._gather(summed(), own, name, dither))

        def wait_all() -> Tensor:
            for received, part in zip(gather()(), parts, strict=True):
                self._codec.decode_sum([received], gradients[part])
            return gradients

        return InTransit(2 * message.nbytes, wait_all)

    def reduce_scatter_async(self, gradients: Tensor, name: str) -> InTransit:
        length = gradients.numel() // self.group.size
        parts = [slice(rank * length, (rank + 1) * length) for rank in range(self.group.size)]
        message = self._encode(gradients, name, parts, self._dither(name))
        return InTransit(message.nbytes, self._sum_async(message, name, gradients.new_empty(length)))

    def all_gather_async(self, rows: Tensor, name: str) -> InTransit:
        """A row is a block of 8 bits, its scale behind it. No error is kept: the next step has other rows."""
        number, width = rows.shape
        levels, scales = rows.new_empty(number, width, dtype=torch.int8), rows.new_empty(number, 1, dtype=torch.float32)
        BlockCodec(8, width).encode(rows.flatten(), levels, scales, None, self._noise.drawn(self._draw(name)))
        message = torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], 1)
        wait = self.group.all_gather_async(message, f"{name}.rows")

        def decode() -> Tensor:
            levels, scales = wait().tensor_split([width], 1)
            return torch.mul(levels.view(torch.int8), scales.contiguous().view(torch.float32))

        return InTransit(message.nbytes, decode)

    def _dither(self, name: str) -> Dither | None:
        return self._noise.drawn(self._draw(name)) if self.stochastic else None

    def _draw(self, name: str) -> Random:
        """Random numbers for the next message of this name: the same for copies of a parameter in a tensor group."""
        number = self._num_sent[name] = self._num_sent.get(name, -1) + 1
        slots = self.layouts[name].slots
        what = slots[0].name if slots else name
        return Random(f"{self.options.seed}/{self._step}/{self.group.rank}/{what}/{number}")

    def _encode(self, gradients: Tensor, name: str, parts: Sequence[slice], dither: Dither | None) -> Tensor:
        """The messages of the parts [parts, bytes], which are equally long; the last ones may lack values."""
        length = parts[0].stop
        message = gradients.new_empty(len(parts), self._codec.message_bytes(length), dtype=torch.uint8)
        for part, row in zip(parts, message, strict=True):
            self._codec.encode(gradients[part], *self._codec.fields(row), self.errors[name][part], dither)
        return message

    def _sum_async(self, message: Tensor, name: str, out: Tensor) -> Callable[[], Tensor]:
        """Start to exchange the parts' messages; the function returned waits and sums this rank's part into `out`."""
        wait, size = self.group.all_to_all_async(message, f"{name}.parts"), self.group.size
        return lambda: self._codec.decode_sum(list(wait()[0].view(size, -1)), out)

    def _gather(self, summed: Tensor, part: slice, name: str, dither: Dither | None) -> Callable[[], Tensor]:
        """Start to gather the parts' encoded sums; what this rank loses here joins its own errors."""
        length = part.stop - part.start
        message = summed.new_empty(1, self._codec.message_bytes(length), dtype=torch.uint8)
        lost = torch.zeros_like(summed)
        self._codec.encode(summed, *self._codec.fields(message[0]), lost, dither)
        self.errors[name][part].add_(lost)
        return self.group.all_gather_async(message, f"{name}.sums")


class Int4Wire(Int8Wire):
    """4 bits per value; a step does not depend on random numbers, but for rows of embeddings, which have 8 bits."""

    format = "int4"
    bits, block, stochastic = 4, 128, False
