"""Shares the matrices of gradient buffers among ranks: each matrix is worked on by one rank, which has it whole.

Replicas have equal gradients, so each takes some of the matrices and all-gathers the results. With ZeRO a replica has
a shard of each buffer, and with tensor parallelism a rank has a piece of each matrix: these parts are collected first,
and the results are spread in the same way.

    gradients    |  rank 0's shard  |  rank 1's shard  |      three matrices; ZeRO cuts the second
                 |     a     |      b       |    c     |
    collect        rank 0: a, c       rank 1: b
    spread       |     a'    |      b'      |    c'    |
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from hvd_transformer.comm.group import MAX_MESSAGE, Group
from hvd_transformer.gradients.buffers import GradBuffer, ParamSlot
from hvd_transformer.nn.contracts import TensorSplit
from hvd_transformer.nn.parallel_layers import split_range


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A parameter, or one of the matrices that it stacks.

    This rank's piece of it, of shape `piece`, starts at `start` of the buffer. The whole matrix has `shape`, and the
    tensor group splits it along `dim`; None: it does not.
    """

    buffer: GradBuffer
    start: int
    piece: tuple[int, int]
    shape: tuple[int, int]
    dim: int | None

    @property
    def stop(self) -> int:
        return self.start + self.piece[0] * self.piece[1]


class SharedMatrices:
    """The matrices of one stage's `buffers`, shared by the replicas and, within each, by the tensor group.

    `splits` and `shapes` are the tensor splits and the unsplit shapes of parameters. The ranks' shares are balanced by
    the `cost` of each matrix, given its shape. Collectives are called by `name`.
    """

    def __init__(
        self,
        buffers: Sequence[GradBuffer],
        *,
        splits: Mapping[str, TensorSplit],
        shapes: Mapping[str, Sequence[int]],
        replicas: Group,
        tensor_group: Group,
        cost: Callable[[tuple[int, int]], float],
        name: str,
    ) -> None:
        self.buffers, tp = buffers, tensor_group.size
        self._matrices = [
            matrix
            for buffer in buffers
            for slot in buffer.slots
            for matrix in _matrices(buffer, slot, splits.get(slot.name), shapes[slot.name], tp)
        ]
        owners = _balanced([cost(matrix.shape) for matrix in self._matrices], replicas.size * tp)
        of_replicas: list[list[_Matrix]] = [[] for _ in range(replicas.size)]
        of_ranks: list[list[_Matrix]] = [[] for _ in range(tp)]  # within this rank's replica
        for matrix, owner in zip(self._matrices, owners, strict=True):
            of_replicas[owner // tp].append(matrix)
            if owner // tp == replicas.rank:
                of_ranks[owner % tp].append(matrix)
        sharded = any(buffer.shard.count > 1 for buffer in buffers)
        kind: type[_Replicated | _Sharded] = _Sharded if sharded else _Replicated
        self._replicas = kind(replicas, f"{name}.replicas", of_replicas)
        self._tensor_group = _Split(tensor_group, f"{name}.tensor", of_ranks)

    def apply_(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each matrix in the buffers' own gradients by `function` of it, computed on one rank. Collective."""
        parts = {matrix: self._replicas.own(matrix) for matrix in self._matrices}
        pieces = self._replicas.collect(parts)
        wholes = self._tensor_group.collect(pieces)
        self._tensor_group.spread({matrix: function(whole) for matrix, whole in wholes.items()}, pieces)
        self._replicas.spread(pieces, parts)


class _Shares:
    """The matrices that each rank of `group` works on: `owned` by rank. Every rank holds a part of each matrix."""

    def __init__(self, group: Group, name: str, owned: Sequence[Sequence[_Matrix]]) -> None:
        self._group, self._name, self._owned = group, name, owned

    def part(self, matrix: _Matrix, whole: Tensor, rank: int) -> Tensor:
        """A view of the part that a rank holds."""
        raise NotImplementedError

    def empty(self, matrix: _Matrix) -> Tensor:
        """Memory for all parts together."""
        raise NotImplementedError

    def collect(self, parts: Mapping[_Matrix, Tensor]) -> dict[_Matrix, Tensor]:
        """The matrices that this rank works on, whole, given its parts of all matrices. Collective."""
        own = self._owned[self._group.rank]
        if self._group.size == 1:
            return {matrix: parts[matrix] for matrix in own}
        wholes = {matrix: self.empty(matrix) for matrix in own}
        sent = [[parts[matrix] for matrix in owned] for owned in self._owned]
        self._exchange(sent, self._parts_by_rank(wholes), "collect")
        return wholes

    def spread(self, wholes: Mapping[_Matrix, Tensor], parts: Mapping[_Matrix, Tensor]) -> None:
        """Overwrite this rank's parts of all matrices, given what each rank has made of its own. Collective."""
        targets = [[parts[matrix] for matrix in owned] for owned in self._owned]
        self._exchange(self._parts_by_rank(wholes), targets, "spread")

    def _parts_by_rank(self, wholes: Mapping[_Matrix, Tensor]) -> list[list[Tensor]]:
        return [
            [self.part(matrix, whole, rank) for matrix, whole in wholes.items()] for rank in range(self._group.size)
        ]

    def _exchange(self, sent: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]], what: str) -> None:
        """Send tensors to each rank, and copy what the ranks send here into the targets."""
        if not any(self._owned):
            return
        counts = [sum(map(torch.numel, tensors)) for tensors in sent]
        flat = _flat([tensor for tensors in sent for tensor in tensors], self._owned)
        received, _ = self._group.all_to_all_async(flat, f"{self._name}.{what}", counts)()
        _unpack(received, [target for tensors in targets for target in tensors])


class _Replicated(_Shares):
    """Every replica holds all of each matrix, or all of its rank's piece."""

    def own(self, matrix: _Matrix) -> Tensor:
        return matrix.buffer.own_gradients[matrix.start : matrix.stop].view(matrix.piece)

    def collect(self, parts: Mapping[_Matrix, Tensor]) -> dict[_Matrix, Tensor]:
        return {matrix: parts[matrix] for matrix in self._owned[self._group.rank]}

    def spread(self, wholes: Mapping[_Matrix, Tensor], parts: Mapping[_Matrix, Tensor]) -> None:
        """`wholes` are among `parts`: they have been overwritten there."""
        if self._group.size == 1:
            return
        for owned in _rounds(self._owned, MAX_MESSAGE):
            flat = _flat([wholes[matrix] for matrix in owned[self._group.rank]], owned)
            gathered = self._group.all_gather_async(flat, f"{self._name}.spread")()
            _unpack(gathered, [parts[matrix] for of_rank in owned for matrix in of_rank])


class _Sharded(_Shares):
    """Replicas hold ZeRO shards of the buffers, and so of each matrix or its rank's piece a range of elements."""

    def own(self, matrix: _Matrix) -> Tensor:
        return matrix.buffer.own_gradients[matrix.buffer.own_part(matrix.start, matrix.stop) or slice(0)]

    def part(self, matrix: _Matrix, whole: Tensor, rank: int) -> Tensor:
        length = matrix.buffer.own.stop - matrix.buffer.own.start
        start, stop = (min(max(shard * length, matrix.start), matrix.stop) for shard in (rank, rank + 1))
        return whole.view(-1)[start - matrix.start : stop - matrix.start]

    def empty(self, matrix: _Matrix) -> Tensor:
        return matrix.buffer.parameters.new_empty(matrix.piece)


class _Split(_Shares):
    """The ranks of a tensor group hold the pieces of each matrix; of one that is not split, all of it."""

    def part(self, matrix: _Matrix, whole: Tensor, rank: int) -> Tensor:
        if matrix.dim is None:
            return whole
        places = split_range(matrix.shape[matrix.dim], rank, self._group.size)
        return whole.narrow(matrix.dim, places.start, len(places))

    def empty(self, matrix: _Matrix) -> Tensor:
        return matrix.buffer.parameters.new_empty(matrix.shape)


def _matrices(
    buffer: GradBuffer, slot: ParamSlot, split: TensorSplit | None, shape: Sequence[int], tp: int
) -> Iterator[_Matrix]:
    """Yield the matrices that are stacked in a parameter."""
    dim, parts = split or (None, 1)
    assert dim == 0 or parts == 1, "stacked rows only"
    (rows, columns), (all_rows, all_columns) = slot.parameter.shape, shape
    rows, all_rows = rows // parts, all_rows // parts
    for start in range(slot.start, slot.stop, rows * columns):
        yield _Matrix(buffer, start, (rows, columns), (all_rows, all_columns), dim if tp > 1 else None)


def _balanced(costs: Sequence[float], count: int) -> list[int]:
    """An owner for each of these costs, of `count`: the largest cost first, to the owner with the least so far."""
    loads = [(0.0, owner) for owner in range(count)]
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + costs[place], owner))
        owners[place] = owner
    return owners


def _rounds(owned: Sequence[Sequence[_Matrix]], most: int) -> list[list[list[_Matrix]]]:
    """The matrices of each rank in messages that have at most so many bytes together; a larger matrix goes alone.

    Horovod's NCCL all-gather counts the bytes in 32 bits (horovod/common/ops/nccl_operations.cc).
    """
    rounds: list[list[list[_Matrix]]] = []
    total = most
    for row in zip_longest(*owned):
        for rank, matrix in enumerate(row):
            if matrix is None:
                continue
            size = (matrix.stop - matrix.start) * matrix.buffer.parameters.itemsize
            if total + size > most:
                rounds.append([[] for _ in owned])
                total = 0
            rounds[-1][rank].append(matrix)
            total += size
    return rounds


def _flat(tensors: Sequence[Tensor], owned: Sequence[Sequence[_Matrix]]) -> Tensor:
    """The tensors as one; if there are none, an empty one of the same type."""
    like = next(matrix for matrices in owned for matrix in matrices).buffer.parameters
    return torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])


def _unpack(flat: Tensor, targets: Sequence[Tensor]) -> None:
    sizes = [target.numel() for target in targets]
    for target, values in zip(targets, flat.split(sizes), strict=True):
        target.copy_(values.view(target.shape))
