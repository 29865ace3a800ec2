"""Gradients of embedding lookups as rows: gathered from the ranks, not summed as matrices that are mostly zero.

    dense   V × D numbers a rank, known when backward ends
    rows    N × D numbers a rank and N token numbers, for the N tokens that the rank looked up

A tied embedding's other part, the output layer's, is dense and known when backward begins: its allreduce is hidden
behind all of backward, and the few rows follow at the end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding


class RowPlan(NamedTuple):
    """How the gradient of a parameter's lookups goes."""

    dense: bool  # another layer gives the parameter a gradient, too: it is tied
    gather: bool  # the ranks' rows are gathered, not added to the matrix before that is sent


class EmbeddingGrad:
    """One step's rows of one parameter [V, D]: `take` in backward, then `add`, or `send` and what that returned.

    `wire` is the number format of the way.
    """

    def __init__(self, parameter: Tensor, name: str, group: Group, wire: torch.dtype) -> None:
        self.parameter, self.name, self.group, self.wire = parameter, name, group, wire
        self._taken: list[tuple[Tensor, Tensor]] = []

    def take(self, tokens: Tensor, rows: Tensor) -> None:
        """Remembers the gradient of a lookup: tokens [N], rows [N, D]."""
        self._taken.append((tokens, rows))

    def clear(self) -> None:
        """Forgets what an unfinished step left."""
        self._taken.clear()

    def add(self, place: Tensor) -> None:
        """Adds this rank's own rows to `place` [V, D], a matrix that is sent as a whole."""
        _add_rows(place, *self._joined())
        self.clear()

    def send(self, place: Tensor, first_row: int = 0) -> Callable[[], None]:
        """Starts the gathering; the function returned waits for it and adds every rank's rows, in rank order.

        So all ranks add the same numbers in the same order, and their replicas stay the same bit for bit. `place` may
        be a part of the matrix's rows.
        """
        tokens, rows = self._joined()
        self.clear()
        wait_tokens = self.group.all_gather_async(tokens, f"{self.name}.tokens")
        wait_rows = self.group.all_gather_async(rows.to(self.wire), f"{self.name}.rows")

        def add() -> None:
            tokens, rows = wait_tokens() - first_row, wait_rows()
            if place.size(0) < self.parameter.size(0):
                own = (tokens >= 0) & (tokens < place.size(0))
                tokens, rows = tokens[own], rows[own]
            _add_rows(place, tokens, rows)

        return add

    def _joined(self) -> tuple[Tensor, Tensor]:
        like = self.parameter
        if not self._taken:  # a rank without samples
            return like.new_empty(0, dtype=torch.int64), like.new_empty(0, like.size(1))
        tokens, rows = (torch.cat(parts) for parts in zip(*self._taken, strict=True))
        return tokens.to(like.device), rows.to(like.device, like.dtype)  # a tied matrix is on its last stage's device


def _add_rows(place: Tensor, tokens: Tensor, rows: Tensor) -> None:
    rows = rows.to(place.dtype)
    if place.is_cuda:  # index_add_ is not deterministic there, embedding's own backward is
        place.add_(torch.ops.aten.embedding_dense_backward(rows, tokens, place.size(0), -1, False))
    else:
        place.index_add_(0, tokens, rows)


@dataclass
class EmbeddingGradPlan:
    """A weight that is looked up."""

    gather: bool  # the rows travel
    embeddings: list[VocabParallelEmbedding] = field(default_factory=list)  # more than one where they share the weight
    dense: bool = False  # another layer uses the weight, too: it is tied

    @property
    def plan(self) -> RowPlan:
        return RowPlan(self.dense, self.gather)


def plan_embedding_grads(
    model: nn.Module, choice: Literal["auto", "always", "never"], num_tokens: int
) -> dict[str, EmbeddingGradPlan]:
    """By parameter name, the embeddings of a model that looks up `num_tokens` tokens a step over all ranks.

    Gathering N rows sends about N × D numbers, summing a matrix of V rows twice V × D: "auto" takes rows while N < V.
    """
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    result: dict[str, EmbeddingGradPlan] = {}
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding) or id(module.weight) not in names:
            continue
        gather = choice == "always" or (choice == "auto" and num_tokens < module.weight.size(0))
        row = result.setdefault(names[id(module.weight)], EmbeddingGradPlan(gather))
        row.embeddings.append(module)
        row.dense = users[id(module.weight)] > len(row.embeddings)
    return result
