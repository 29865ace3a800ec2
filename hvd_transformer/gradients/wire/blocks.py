"""Blocks of values with one scale each, in 8 or 4 bits: encoded, decoded and summed.

message   | levels, padded to whole blocks | float32 scale of each block |
8 bits    a byte is a level from -127 to 127
4 bits    a byte is 16 × a level of the block's first half + one of its second half, each from -7 to 7
"""

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from hvd_transformer.gradients.wire.plain import chunk_size, chunks

_SCALE_BYTES = 4
_ALIGNED = 16  # values: 64 bytes, which vector instructions like
_TINY = 1e-30  # of a block of zeros, whose scale's inverse must be finite


# From blocks to numbers of the same shape, from 0 to below 1.
Dither = Callable[[Tensor], Tensor]


class Noise:
    """The noise of stochastic rounding: a table of random numbers, read from another random place for every chunk.

    New random numbers would take longer than all the rest.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._tables = seed, dict[torch.device, Tensor]()

    def drawn(self, draw: Random) -> Dither:
        """Noise from places that `draw` chooses."""

        def like(rows: Tensor) -> Tensor:
            table = self._table(rows.device)
            place = draw.randrange(table.numel() // 2 // _ALIGNED) * _ALIGNED
            return table[place : place + rows.numel()].view_as(rows)

        return like

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            generator = torch.Generator().manual_seed(self._seed)
            # A sum below 127 + 1 must not be rounded up to 128, which 8 bits do not have.
            noise = torch.rand(2 * chunk_size(device), generator=generator).clamp_(max=1 - 2**-12)
            self._tables[device] = noise.to(device)
        return self._tables[device]


class BlockCodec:
    """Encodes and decodes blocks of `width` values in `bits` bits."""

    def __init__(self, bits: int, width: int) -> None:
        assert bits in (4, 8)
        self.bits, self.width, self.largest = bits, width, 2 ** (bits - 1) - 1

    def message_bytes(self, length: int) -> int:
        """The size of the message of this many values."""
        return -(-length // self.width) * (self.width * self.bits // 8 + _SCALE_BYTES)

    def fields(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The levels [blocks, bytes] and scales [blocks, 1] of a message: views."""
        row = self.width * self.bits // 8
        blocks = message.numel() // (row + _SCALE_BYTES)
        levels, scales = message.split([blocks * row, blocks * _SCALE_BYTES])
        return levels.view(torch.int8).view(-1, row), scales.view(torch.float32).view(-1, 1)

    def encode(
        self, values: Tensor, levels: Tensor, scales: Tensor, errors: Tensor | None, dither: Dither | None
    ) -> None:
        """Fill the fields of a message with n values plus errors; errors are then what it lacks.

        Rounding is stochastic with dither, to the nearest level without.

        A value that is not finite makes its block decode to values that are not.
        """
        width = self.width
        count = -(-values.numel() // width)
        levels[count:].zero_()
        scales[count:].zero_()
        work = values.new_empty(2, min(chunk_size(values.device), count * width), dtype=torch.float32)
        for chunk in chunks(values, width):
            some, error, blocks = values[chunk], None if errors is None else errors[chunk], _blocks(chunk, width)
            spare, rounded = work[:, : (blocks.stop - blocks.start) * width]
            in_place = error is not None and _fits(error, width)
            exact = error if error is not None and in_place else spare
            if error is None:
                exact[: some.numel()].copy_(some)
            else:
                torch.add(some, error, out=exact[: some.numel()])
            exact[some.numel() :].zero_()
            rows, nearest = exact.view(-1, width), rounded.view(-1, width)
            scale = torch.abs(rows, out=nearest).amax(1, keepdim=True).div_(self.largest)
            self._round(rows, scale, nearest, dither)
            self._pack(nearest, levels[blocks])
            scales[blocks].copy_(scale)
            if error is not None:
                rows.addcmul_(nearest, scale, value=-1)
                if not in_place:
                    error.copy_(exact[: some.numel()])

    def decode_sum(self, messages: Sequence[Tensor], out: Tensor) -> Tensor:
        """Write the sum of the messages' values, added in their order, into `out` [n]."""
        fields, width = [self.fields(message) for message in messages], self.width
        work = out.new_empty(2, min(chunk_size(out.device), -(-out.numel() // width) * width), dtype=torch.float32)
        for chunk in chunks(out, width):
            some, blocks = out[chunk], _blocks(chunk, width)
            spare, unpacked = work[:, : (blocks.stop - blocks.start) * width]
            in_place = _fits(some, width)
            total = (some if in_place else spare).view(-1, width)
            for number, (levels, scales) in enumerate(fields):
                self._add(levels[blocks], scales[blocks], unpacked, total, first=number == 0)
            if not in_place:
                some.copy_(spare[: some.numel()])
        return out

    def _round(self, rows: Tensor, scale: Tensor, out: Tensor, dither: Dither | None) -> None:
        inverse = scale.clamp_min(_TINY).reciprocal_()
        if dither is None:
            torch.mul(rows, inverse, out=out).round_()
        else:
            torch.addcmul(dither(rows), rows, inverse, out=out).floor_()

    def _pack(self, rounded: Tensor, levels: Tensor) -> None:
        if self.bits == 4:
            first, second = rounded.chunk(2, 1)
            rounded = torch.add(second, first, alpha=16)
        levels.copy_(rounded)

    def _add(self, levels: Tensor, scale: Tensor, work: Tensor, total: Tensor, *, first: bool) -> None:
        """Add levels × scale to `total`, or write it there."""
        parts = [work.view(-1, *levels.shape)[0].copy_(levels)]
        if self.bits == 4:
            high = torch.mul(parts[0], 1 / 16, out=work.view(2, *levels.shape)[1]).round_()
            parts = [high, parts[0].sub_(high, alpha=16)]
        for part, place in zip(parts, total.chunk(len(parts), 1), strict=True):
            if first:
                torch.mul(part, scale, out=place)
            else:
                place.addcmul_(part, scale)


def _blocks(chunk: slice, width: int) -> slice:
    """The blocks of these values."""
    return slice(chunk.start // width, -(-chunk.stop // width))


def _fits(values: Tensor, width: int) -> bool:
    """Whether blocks can be computed where these values are."""
    return values.dtype == torch.float32 and values.numel() % width == 0
