"""Which rank writes which part of which file of a checkpoint.

A host writes its own files, so that two hosts never write the same page of one; with one host there is one file:

    model.safetensors            model-00001-of-00002.safetensors      model-00002-of-00002.safetensors
    |    a    |  b  |   c    |   |    a    |  b  |                     |   c    |
    | rank 0 | rank 1 | r. 2 |   | rank 0 | rank 1 |                   | rank 2 |

Ranks that hold the same tensors write an equal part each (`SharedFiles`); with ZeRO each rank writes its shard
(`ShardFiles`), and a tensor whose shards are on several hosts is stored in pieces.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from hvd_transformer.checkpoint.shards import StridedBlocks
from hvd_transformer.checkpoint.tensor_file import Entry


@dataclass(frozen=True)
class Writers:
    """The number of the host whose files each rank writes; None for a rank that does not see the folder.

    Rank 0 sees it. Those that do not send what they hold to those that do.
    """

    hosts: tuple[int | None, ...]

    @classmethod
    def of(cls, names: Sequence[str], sees: Sequence[bool]) -> "Writers":
        """From the name of each rank's host and whether the rank sees the folder."""
        numbers: dict[str, int] = {}
        return cls(
            tuple(
                numbers.setdefault(name, len(numbers)) if seeing else None
                for name, seeing in zip(names, sees, strict=True)
            )
        )

    @cached_property
    def ranks(self) -> list[list[int]]:
        """Ranks that can see the folder, per host."""
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            if host is not None:
                found.setdefault(host, []).append(rank)
        return [found[host] for host in range(len(found))]

    def host(self, rank: int) -> int:
        """The host whose files the rank writes."""
        host = self.hosts[rank]
        assert host is not None
        return host

    @property
    def all_see(self) -> bool:
        return None not in self.hosts

    def file(self, name: str, host: int) -> str:
        """The host's file of tensors; `name` is that of the only one of a single host."""
        stem, _, suffix = name.rpartition(".")
        count = len(self.ranks)
        return name if count == 1 else f"{stem}-{host + 1:05d}-of-{count:05d}.{suffix}"


@dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one, that is stored as one tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    blocks: StridedBlocks
    start: int  # in the blocks
    count: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Sequence[int]) -> "Piece":
        """The whole tensor."""
        return cls(name, dtype, tuple(shape), StridedBlocks.of(shape), 0, prod(shape))

    @property
    def whole(self) -> bool:
        return self.count == prod(self.shape)

    @property
    def entry(self) -> Entry:
        if self.whole:
            return Entry(self.name, self.dtype, self.shape)
        return Entry(f"{self.name}.{self.blocks.offset}.{self.start}", self.dtype, (self.count,))


class Span(NamedTuple):
    """The elements [first, last) of a piece, which one rank writes."""

    piece: Piece
    first: int
    last: int


class Files(Protocol):
    """The files of one kind, such as the model's."""

    def pieces(self, host: int) -> list[Piece]:
        """Pieces in the host's file, in order."""

    def spans(self, rank: int) -> list[Span]:
        """Spans of its host's file that the rank writes, in order."""


class SharedFiles:
    """Files of whole tensors that all of the ranks can write: each writes an equal part."""

    def __init__(self, pieces: Sequence[Piece], writers: Writers) -> None:
        self._pieces, self._writers = _by_size(pieces), writers

    @cached_property
    def _of_hosts(self) -> list[list[Piece]]:
        """Whole tensors, in order, so many for each host as it has ranks."""
        ranks = self._writers.ranks
        total = sum(piece.entry.nbytes for piece in self._pieces)
        found: list[list[Piece]] = [[] for _ in ranks]
        host = before = 0
        share = len(ranks[0])  # of the hosts until this one
        for piece in self._pieces:
            size = piece.entry.nbytes
            while host < len(ranks) - 1 and (2 * before + size) * sum(map(len, ranks)) >= 2 * total * share:
                host += 1
                share += len(ranks[host])
            found[host].append(piece)
            before += size
        return found

    def pieces(self, host: int) -> list[Piece]:
        return self._of_hosts[host]

    def spans(self, rank: int) -> list[Span]:
        host = self._writers.hosts[rank]
        if host is None:
            return []
        pieces, ranks = self._of_hosts[host], self._writers.ranks[host]
        total, index = sum(piece.entry.nbytes for piece in pieces), ranks.index(rank)
        start, stop = (total * place // len(ranks) for place in (index, index + 1))
        found, before = [], 0
        for piece in pieces:
            size, item = piece.entry.nbytes, piece.dtype.itemsize
            first, last = ((min(max(place - before, 0), size) + item - 1) // item for place in (start, stop))
            if first < last:
                found.append(Span(piece, first, last))
            before += size
        return found


class BufferLayout(NamedTuple):
    """A gradient buffer: the length of a shard, and the parameters with their places in the whole buffer."""

    length: int
    slots: Sequence[tuple[str, int, int]]

    def within(self, first: int, last: int) -> Iterator[tuple[str, int, int]]:
        """The parameters that the shards [first, last) hold a part of, each with its start in itself and its length."""
        for name, begin, end in self.slots:
            start, stop = max(begin, first * self.length), min(end, last * self.length)
            if start < stop:
                yield name, start - begin, stop - start


class Column(NamedTuple):
    """Ranks that hold the ZeRO shards of the same tensors, in the order of their shards."""

    ranks: Sequence[int]
    buffers: Sequence[BufferLayout]
    pieces: Mapping[str, Piece]  # each whole piece of theirs that is saved, by the name of its parameter

    def held(self, first: int, last: int) -> dict[str, tuple[int, int]]:
        """What the shards [first, last) hold: start in the piece and number of elements, by the parameter's name."""
        return {
            name: (start, count)
            for buffer in self.buffers
            for name, start, count in buffer.within(first, last)
            if name in self.pieces
        }


class ShardFiles:
    """Files of the ZeRO shards of the optimizer state: each rank writes its own. `names` are such as "exp_avg.bias".

    A tensor whose shards are on several hosts is stored as a piece on each. All ranks see the folder.
    """

    def __init__(self, columns: Sequence[Column], names: Collection[str], writers: Writers) -> None:
        self._columns, self._names, self._writers = columns, set(names), writers
        self._keys = sorted({name.partition(".")[0] for name in names})

    def pieces(self, host: int) -> list[Piece]:
        return _by_size([piece for column in self._columns for piece, _ in self._stored(column, host)])

    def spans(self, rank: int) -> list[Span]:
        host, own = self._writers.host(rank), {}
        for column in self._columns:
            if rank not in column.ranks:
                continue
            place = column.ranks.index(rank)
            held = column.held(place, place + 1)
            for piece, name in self._stored(column, host):
                start, count = held.get(name, (0, 0))
                first, last = max(start, piece.start), min(start + count, piece.start + piece.count)
                if first < last:
                    own[piece] = Span(piece, first - piece.start, last - piece.start)
        return [own[piece] for piece in self.pieces(host) if piece in own]

    def _stored(self, column: Column, host: int) -> Iterator[tuple[Piece, str]]:
        """The host's pieces with the names of their parameters: neighbouring shards of a host are one piece."""
        of_host = [place for place, rank in enumerate(column.ranks) if self._writers.host(rank) == host]
        for _, run in groupby(enumerate(of_host), lambda numbered: numbered[1] - numbered[0]):
            places = [place for _, place in run]
            held = column.held(places[0], places[-1] + 1)
            for key in self._keys:
                for name, (start, count) in held.items():
                    if f"{key}.{name}" not in self._names:
                        continue
                    yield replace(column.pieces[name], name=f"{key}.{name}", start=start, count=count), name


def index(name: str, files: Files, writers: Writers) -> dict[str, str]:
    """The text of the index by its file name; none if the only file holds whole tensors.

    As Hugging Face writes it; "pieces" are ours, for tensors that no file has as a whole.
    """
    weight_map: dict[str, str] = {}
    pieces: dict[str, dict[str, Any]] = {}
    total = 0
    for host in range(len(writers.ranks)):
        file = writers.file(name, host)
        for piece in files.pieces(host):
            total += piece.entry.nbytes
            if piece.whole:
                weight_map[piece.name] = file
                continue
            blocks = piece.blocks
            part = {"file": file, "tensor": piece.entry.key, "start": piece.start, "count": piece.count}
            part["blocks"] = [blocks.length, blocks.stride, blocks.offset]
            pieces.setdefault(piece.name, {"shape": piece.shape, "parts": []})["parts"].append(part)
    if len(writers.ranks) == 1 and not pieces:
        return {}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map} | ({"pieces": pieces} if pieces else {})
    return {f"{name}.index.json": json.dumps(content, indent=2, sort_keys=True) + "\n"}


def _by_size(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort pieces by element size, largest first, so that each starts at a multiple of its element's size."""
    return sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
