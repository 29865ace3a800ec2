"""Gradients in transit in 8 bits: blocks of 256 values with one float32 scale each, about 1 byte per value.

    2 ranks    encode → all-gather → each rank decodes and sums
    more       encode parts → all-to-all → each rank sums its part in float32 → encode → all-gather → decode

Rounding is stochastic and so unbiased: 3.3 becomes 4 with probability 0.3. What it loses is fed back, the loss of the
encoded sum by the rank that encoded it. Horovod never sums 8-bit numbers, which would overflow.

A part's message:  | 8-bit levels, padded to whole blocks | float32 scale of each block |
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.wire.feedback import FeedbackWire
from hvd_transformer.gradients.wire.plain import InTransit, Layout, WireOptions, chunk_size, chunks

BLOCK = 256
LEVELS = 127
_SCALE_BYTES = 4
_TINY = 1e-30  # of a block of zeros, whose scale's inverse must be finite


class Int8Codec:
    """Encodes and decodes blocks.

    The noise of stochastic rounding is a table of random numbers, read from another random place for every chunk: new
    random numbers would take longer than all the rest.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._noise = seed, dict[torch.device, Tensor]()

    def encode(
        self, values: Tensor, levels: Tensor, scales: Tensor, draw: Random, errors: Tensor | None = None
    ) -> None:
        """Fill `levels` [blocks, width] and `scales` [blocks, 1] with n values plus errors; errors are then the loss.

        A value that is not finite makes its block decode to values that are not.
        """
        width = levels.size(1)
        count = -(-values.numel() // width)
        levels[count:].zero_()
        scales[count:].zero_()
        noise = self._noise_on(values.device)
        work = values.new_empty(2, min(chunk_size(values.device), count * width), dtype=torch.float32)
        for chunk in chunks(values, width):
            some, blocks = values[chunk], _blocks(chunk, width)
            exact, rounded = work[:, : len(levels[blocks]) * width]
            exact[some.numel() :].zero_()
            if errors is None:
                exact[: some.numel()].copy_(some)
            else:
                torch.add(some, errors[chunk], out=exact[: some.numel()])
            rows, nearest = exact.view(-1, width), rounded.view(-1, width)
            scale = torch.abs(rows, out=nearest).amax(1, keepdim=True).div_(LEVELS)
            place = draw.randrange(noise.numel() // 2)
            dither = noise[place : place + exact.numel()].view(-1, width)
            torch.addcmul(dither, rows, scale.clamp_min(_TINY).reciprocal_(), out=nearest).floor_()
            levels[blocks].copy_(nearest)
            scales[blocks].copy_(scale)
            if errors is not None:
                torch.addcmul(rows, nearest, scale, value=-1, out=rows)
                errors[chunk].copy_(exact[: some.numel()])

    def _noise_on(self, device: torch.device) -> Tensor:
        if device not in self._noise:
            generator = torch.Generator().manual_seed(self._seed)
            # A sum below 127 + 1 must not be rounded up to 128, which 8 bits do not have.
            noise = torch.rand(2 * chunk_size(device), generator=generator).clamp_(max=1 - 2**-12)
            self._noise[device] = noise.to(device)
        return self._noise[device]


def message_bytes(length: int) -> int:
    """The size of the message of this many values."""
    return -(-length // BLOCK) * (BLOCK + _SCALE_BYTES)


def decode_sum(messages: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the sum of the messages' values, added in their order, into `out` [n]."""
    fields = [_fields(message) for message in messages]
    work = out.new_empty(2, min(chunk_size(out.device), -(-out.numel() // BLOCK) * BLOCK), dtype=torch.float32)
    for chunk in chunks(out, BLOCK):
        some, blocks = out[chunk], _blocks(chunk, BLOCK)
        rows, total = work[:, : (blocks.stop - blocks.start) * BLOCK].view(2, -1, BLOCK)
        for number, (levels, scales) in enumerate(fields):
            rows.copy_(levels[blocks])
            if number:
                total.addcmul_(rows, scales[blocks])
            else:
                torch.mul(rows, scales[blocks], out=total)
        some.copy_(total.flatten()[: some.numel()])
    return out


def _fields(message: Tensor) -> tuple[Tensor, Tensor]:
    """The levels [blocks, BLOCK] and scales [blocks, 1] of a message: views."""
    blocks = message.numel() // (BLOCK + _SCALE_BYTES)
    levels, scales = message.split([blocks * BLOCK, blocks * _SCALE_BYTES])
    return levels.view(torch.int8).view(-1, BLOCK), scales.view(torch.float32).view(-1, 1)


def _blocks(chunk: slice, width: int) -> slice:
    """The blocks of these values."""
    return slice(chunk.start // width, -(-chunk.stop // width))


class Int8Wire(FeedbackWire):
    """8 bits per value; the ranks sum what they have received, in float32 and in rank order.

    A rank's rounding depends on the seed, the step, its rank and the first parameter of the buffer, so that a run
    repeats bit for bit.
    """

    format = "int8"

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        self._codec, self._step = Int8Codec(self.options.seed), 0
        self._num_sent: dict[str, int] = {}  # in this step

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        super().begin_step(step, total_steps, scale)
        self._step = step
        self._num_sent.clear()

    def all_reduce_async(self, gradients: Tensor, name: str) -> InTransit:
        size, draw = self.group.size, self._draw(name)
        if size == 2:
            message = self._encode(gradients, name, [slice(0, gradients.numel())], draw)
            wait = self.group.all_gather_async(message, name)
            return InTransit(message.nbytes, lambda: decode_sum(list(wait()), gradients))
        length = -(-gradients.numel() // (size * BLOCK)) * BLOCK
        parts = [slice(rank * length, (rank + 1) * length) for rank in range(size)]
        message = self._encode(gradients, name, parts, draw)
        own = parts[self.group.rank]
        summed = self._sum_async(message, name, torch.empty_like(gradients[own]))
        gather = self._when_sent(lambda: self._gather(summed(), own, name, draw))

        def wait_all() -> Tensor:
            for received, part in zip(gather()(), parts, strict=True):
                decode_sum([received], gradients[part])
            return gradients

        return InTransit(2 * message.nbytes, wait_all)

    def reduce_scatter_async(self, gradients: Tensor, name: str) -> InTransit:
        length = gradients.numel() // self.group.size
        parts = [slice(rank * length, (rank + 1) * length) for rank in range(self.group.size)]
        message = self._encode(gradients, name, parts, self._draw(name))
        return InTransit(message.nbytes, self._sum_async(message, name, gradients.new_empty(length)))

    def all_gather_async(self, rows: Tensor, name: str) -> InTransit:
        """A row is a block, its scale behind it. No error is kept: the next step has other rows."""
        number, width = rows.shape
        levels, scales = rows.new_empty(number, width, dtype=torch.int8), rows.new_empty(number, 1, dtype=torch.float32)
        self._codec.encode(rows.flatten(), levels, scales, self._draw(name))
        message = torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], 1)
        wait = self.group.all_gather_async(message, f"{name}.rows")

        def decode() -> Tensor:
            levels, scales = wait().split([width, _SCALE_BYTES], 1)
            return torch.mul(levels.view(torch.int8), scales.contiguous().view(torch.float32))

        return InTransit(message.nbytes, decode)

    def _draw(self, name: str) -> Random:
        """Random numbers for the next message of this name: the same for copies of a parameter in a tensor group."""
        number = self._num_sent[name] = self._num_sent.get(name, -1) + 1
        slots = self.layouts[name].slots
        what = slots[0].name if slots else name
        return Random(f"{self.options.seed}/{self._step}/{self.group.rank}/{what}/{number}")

    def _encode(self, gradients: Tensor, name: str, parts: Sequence[slice], draw: Random) -> Tensor:
        """The messages of the parts [parts, bytes], which are equally long; the last ones may lack values."""
        length = parts[0].stop
        message = gradients.new_empty(len(parts), message_bytes(length), dtype=torch.uint8)
        for part, row in zip(parts, message, strict=True):
            self._codec.encode(gradients[part], *_fields(row), draw, self.errors[name][part])
        return message

    def _sum_async(self, message: Tensor, name: str, out: Tensor) -> Callable[[], Tensor]:
        """Start to exchange the parts' messages; the function returned waits and sums this rank's part into `out`."""
        wait, size = self.group.all_to_all_async(message, f"{name}.parts"), self.group.size
        return lambda: decode_sum(list(wait()[0].view(size, -1)), out)

    def _gather(self, summed: Tensor, part: slice, name: str, draw: Random) -> Callable[[], Tensor]:
        """Start to gather the parts' encoded sums; what this rank loses here joins its own errors."""
        length = part.stop - part.start
        message = summed.new_empty(1, message_bytes(length), dtype=torch.uint8)
        lost = torch.zeros_like(summed)
        self._codec.encode(summed, *_fields(message[0]), draw, lost)
        self.errors[name][part].add_(lost)
        return self.group.all_gather_async(message, f"{name}.sums")
