"""Brings the parts of tensors that are spread over the ranks of a group to the ranks that write them.

A row-parallel weight is columns on each rank, and a file has its rows: written from each rank, a row would be a system
call. Here the ranks swap what others write, some megabytes at a time, and each then has contiguous elements.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_transformer.checkpoint.layout import Span
from hvd_transformer.checkpoint.shards import StridedBlocks, TensorShard, copy_overlap
from hvd_transformer.comm.group import Group

# Bytes that a rank sends, and that it receives, at a time.
EXCHANGE_BYTES = 16 << 20


class Held(NamedTuple):
    """`length` elements of a rank's piece of a tensor."""

    blocks: StridedBlocks
    start: int
    length: int

    def between(self, first: int, last: int) -> tuple[int, int]:
        """Start and number of those in [first, last) of the whole tensor."""
        start = max(self.blocks.before(first), self.start)
        return start, max(0, min(self.blocks.before(last), self.start + self.length) - start)


def exchange(
    group: Group,
    own: Mapping[str, TensorShard],
    held: Callable[[int, str], Held | None],
    wanted: Sequence[Sequence[Span]],
    targets: Sequence[TensorShard],
) -> None:
    """Fill `targets`, one for each span that this rank wants, with what the other ranks hold. Collective.

    `held` says what a rank of the group sends of a tensor (None: nothing), and `wanted` has the spans of every rank;
    both must be the same on all ranks. The spans' pieces are whole tensors.
    """
    limit = EXCHANGE_BYTES // max(1, sum(map(bool, wanted)))  # those who do not see the folder write nothing
    target_of = {span.piece.name: target for span, target in zip(wanted[group.rank], targets, strict=True)}
    spread = {name for name in own if any(held(rank, name) is not None for rank in range(group.size))}
    chunks = [list(_chunks([span for span in spans if span.piece.name in spread], limit)) for spans in wanted]
    some = next(iter(own.values())).values if own else torch.empty(0)
    for number in range(max(map(len, chunks))):
        due = [of_rank[number] if number < len(of_rank) else [] for of_rank in chunks]
        sent = [
            [
                own[span.piece.name].between(first, last).view(torch.uint8).to(some.device)  # of other stages' GPUs
                for span, first, last in of_rank
                if rank != group.rank and held(group.rank, span.piece.name) is not None
            ]
            for rank, of_rank in enumerate(due)
        ]
        counts = [sum(map(torch.numel, of_rank)) for of_rank in sent]
        flat = torch.cat([some.new_empty(0, dtype=torch.uint8), *(values for of_rank in sent for values in of_rank)])
        received, _ = group.all_to_all_async(flat, "checkpoint.exchange", counts)()
        for rank in range(group.size):
            for span, first, last in due[group.rank]:
                has = held(rank, span.piece.name)
                if has is None or rank == group.rank:
                    continue
                start, count = has.between(first, last)
                values, received = _take(received, count, span.piece.dtype)
                source = TensorShard(span.piece.shape, has.blocks, start, values)
                copy_overlap(_part(target_of[span.piece.name], first, last), source)


def _chunks(spans: Sequence[Span], limit: int) -> Iterator[list[tuple[Span, int, int]]]:
    """The spans in lists of about `limit` bytes: (span, first, last) of the whole tensor."""
    chunk: list[tuple[Span, int, int]] = []
    room = limit
    for span in spans:
        first, item = span.first, span.piece.dtype.itemsize
        while first < span.last:
            last = min(span.last, first + max(1, room // item))
            chunk.append((span, first, last))
            room -= (last - first) * item
            first = last
            if room < item:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk


def _part(target: TensorShard, first: int, last: int) -> TensorShard:
    """The elements [first, last) of a contiguous part of a whole tensor."""
    return TensorShard(target.shape, target.blocks, first, target.between(first, last))


def _take(received: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The next `count` elements of the bytes received, and the bytes after them."""
    size = count * dtype.itemsize
    values = received[:size]
    if values.storage_offset() % dtype.itemsize:  # after a tensor with smaller elements
        values = values.clone()
    return values.view(dtype), received[size:]
