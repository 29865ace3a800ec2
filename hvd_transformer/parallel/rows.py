"""Gradients of embedding lookups as rows: gathered from the ranks, not summed as matrices that are mostly zero.

    dense   V × D numbers a rank, known when backward ends
    rows    N × D numbers a rank and N token numbers, for the N tokens that the rank looked up

A tied embedding's other part, the output layer's, is dense and known when backward begins: its allreduce is hidden
behind all of backward, and the few rows follow at the end.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group


class RowPlan(NamedTuple):
    """How the gradient of a parameter's lookups goes."""

    dense: bool  # another layer gives the parameter a gradient, too: it is tied
    gather: bool  # the ranks' rows are gathered, not added to the matrix before that is sent


class RowGradient:
    """One step's rows of one parameter: `take` in backward, `send`, then the function that `send` returned.

    `place` [V, D] is where the parameter's gradient lies, `wire` the number format of the way.
    """

    def __init__(self, place: Tensor, name: str, group: Group, wire: torch.dtype) -> None:
        self.place, self.name, self.group, self.wire = place, name, group, wire
        self._taken: list[tuple[Tensor, Tensor]] = []

    def take(self, tokens: Tensor, rows: Tensor) -> None:
        """Remembers the gradient of a lookup: tokens [N], rows [N, D]."""
        self._taken.append((tokens, rows))

    def clear(self) -> None:
        """Forgets what an unfinished step left."""
        self._taken.clear()

    def add(self) -> None:
        """Adds this rank's own rows, for a matrix that is sent as a whole."""
        _add_rows(self.place, *_joined(self._taken, self.place))
        self.clear()

    def send(self) -> Callable[[], None]:
        """Starts the gathering; the function returned waits for it and adds every rank's rows, in rank order.

        So all ranks add the same numbers in the same order, and their replicas stay the same bit for bit.
        """
        tokens, rows = _joined(self._taken, self.place)
        self.clear()
        wait_tokens = self.group.all_gather_async(tokens, f"{self.name}.tokens")
        wait_rows = self.group.all_gather_async(rows.to(self.wire), f"{self.name}.rows")
        return lambda: _add_rows(self.place, wait_tokens(), wait_rows())


def _joined(taken: Sequence[tuple[Tensor, Tensor]], place: Tensor) -> tuple[Tensor, Tensor]:
    if not taken:  # a rank without samples
        return place.new_empty(0, dtype=torch.int64), place.new_empty(0, place.size(1))
    tokens, rows = (torch.cat(parts) for parts in zip(*taken, strict=True))
    return tokens.to(place.device), rows.to(place.device, place.dtype)  # a tied matrix is on its last stage's device


def _add_rows(place: Tensor, tokens: Tensor, rows: Tensor) -> None:
    rows = rows.to(place.dtype)
    if place.is_cuda:  # index_add_ is not deterministic there, embedding's own backward is
        place.add_(torch.ops.aten.embedding_dense_backward(rows, tokens, place.size(0), -1, False))
    else:
        place.index_add_(0, tokens, rows)
