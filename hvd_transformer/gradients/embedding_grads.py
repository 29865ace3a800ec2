"""Gradients of embedding lookups as rows: gathered from the ranks instead of summed as mostly zero matrices.

    dense   V × D numbers per rank, complete when backward ends
    rows    N × D numbers per rank and N token numbers, for the N tokens that the rank looked up

The other gradient of a tied embedding, the output layer's, is dense and complete when backward begins: its allreduce
overlaps with all of backward, and the few rows follow at the end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from hvd_transformer.comm.streams import has_streams
from hvd_transformer.gradients.wire.plain import Wire
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding


@dataclass
class EmbeddingGradPlan:
    """How the gradient of one parameter's lookups is reduced."""

    gather: bool  # gather the ranks' rows, instead of adding them to the matrix before it is sent
    embeddings: list[VocabParallelEmbedding] = field(default_factory=list)  # several may share the parameter
    dense: bool = False  # another layer gives the parameter a gradient, too: it is tied


def plan_embedding_grads(
    model: nn.Module, choice: Literal["auto", "always", "never"], num_tokens: int
) -> dict[str, EmbeddingGradPlan]:
    """The plans by parameter name, for a model that looks up `num_tokens` tokens per step over all ranks.

    Gathering N rows sends about N × D numbers, reducing a matrix of V rows 2 × V × D: "auto" gathers while N < V.
    """
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    result: dict[str, EmbeddingGradPlan] = {}
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding) or id(module.weight) not in names:
            continue
        gather = choice == "always" or (choice == "auto" and num_tokens < module.weight.size(0))
        plan = result.setdefault(names[id(module.weight)], EmbeddingGradPlan(gather))
        plan.embeddings.append(module)
        plan.dense = users[id(module.weight)] > len(plan.embeddings)
    return result


class RowSink:
    """The rows of one embedding's lookups in one step: implements `EmbeddingGrads`.

    With `sums` they are added up once there are more of them than the matrix has, so that a step of any length holds at
    most twice as many.
    """

    def __init__(self, parameter: Tensor, sums: bool) -> None:
        self._like, self._sums = parameter, sums
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._num_rows = 0
        self._sum: Tensor | None = None

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        self._rows.append((tokens, rows))
        self._num_rows += tokens.numel()
        if self._sums and self._num_rows > self._like.size(0):
            if self._sum is None:
                self._sum = torch.zeros_like(self._like, device=rows.device)
            _add_all(self._sum, self._rows)
            self._rows.clear()  # from here on at once: the order of sums must not depend on the micro-batches

    def clear(self) -> None:
        self._rows.clear()
        self._num_rows, self._sum = 0, None

    def add(self, matrix: Tensor) -> None:
        """Add all to `matrix` [V, D]."""
        if self._sum is not None:
            matrix.add_(self._sum.to(matrix.device))
        _add_all(matrix, [(tokens.to(matrix.device), rows.to(matrix.device)) for tokens, rows in self._rows])
        self.clear()

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """All rows, on the parameter's device: that of its last stage if it is tied."""
        device, dtype = self._like.device, self._like.dtype
        found = [(tokens.to(device), rows.to(device, dtype)) for tokens, rows in self._rows]
        self.clear()
        return found


class EmbeddingGrad:
    """The gradient of one parameter's lookups [V, D] in one step.

    Each embedding that shares the parameter puts its rows into a `sink` of its own, since pipeline stages run their
    backwards side by side and the order of additions is to be the same each time. Then either `add`, or `send` and
    `add_gathered`. `name` is that of the rows on the wire; `gather`: they will be sent.
    """

    def __init__(self, parameter: Tensor, name: str, wire: Wire, gather: bool) -> None:
        self.parameter, self.name, self.wire = parameter, name, wire
        self._gather, self._sinks = gather, list[RowSink]()
        self._gathered: list[Callable[[], Tensor]] = []

    def sink(self) -> RowSink:
        """Takes the rows of one more embedding; rows are added in the order of these calls."""
        self._sinks.append(RowSink(self.parameter, sums=not self._gather))
        return self._sinks[-1]

    def clear(self) -> None:
        """Drop what an unfinished step left."""
        for sink in self._sinks:
            sink.clear()

    def add(self, matrix: Tensor) -> None:
        """Add this rank's rows to `matrix` [V, D], which is then sent as a whole."""
        for sink in self._sinks:
            sink.add(matrix)

    def send(self) -> None:
        """Start to gather the rows of all ranks."""
        tokens, rows = self._take()
        self._gathered = [
            self.wire.group.all_gather_async(tokens, f"{self.name}.tokens"),
            self.wire.all_gather_async(rows, self.name).wait,
        ]

    def add_gathered(self, matrix: Tensor, first_row: int = 0) -> None:
        """Wait for the rows and add them to `matrix`, in rank order: replicas stay bitwise equal.

        `matrix` may be a range of the parameter's rows, from `first_row`.
        """
        tokens, rows = (wait() for wait in self._gathered)
        tokens, num_rows = tokens - first_row, matrix.size(0)
        if not num_rows:  # a shard of padding alone
            return
        if num_rows < self.parameter.size(0):
            own = (tokens >= 0) & (tokens < num_rows)
            if has_streams(matrix.device):
                # To leave out the others' rows, the host would have to wait for their number. They become zeros, which
                # are spread over the matrix: a kernel adds up all rows of one token in turn.
                tokens, rows = tokens % num_rows, rows.masked_fill(~own[:, None], 0)
            else:
                tokens, rows = tokens[own], rows[own]
        _add_rows(matrix, tokens, rows)

    def _take(self) -> tuple[Tensor, Tensor]:
        like = self.parameter
        held = [pair for sink in self._sinks for pair in sink.take()]
        if not held:  # a rank without samples
            return like.new_empty(0, dtype=torch.int64), like.new_empty(0, like.size(1))
        return _joined(held)


def _joined(held: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens, rows = (torch.cat(parts) for parts in zip(*held, strict=True))
    return tokens, rows


def _add_all(matrix: Tensor, held: list[tuple[Tensor, Tensor]]) -> None:
    if matrix.is_cuda and held:  # where each call of `_add_rows` makes a matrix
        held = [_joined(held)]
    for tokens, rows in held:
        _add_rows(matrix, tokens, rows)


def _add_rows(matrix: Tensor, tokens: Tensor, rows: Tensor) -> None:
    rows = rows.to(matrix.dtype)
    if matrix.is_cuda:  # index_add_ is not deterministic on GPUs, embedding's own backward is
        matrix.add_(torch.ops.aten.embedding_dense_backward(rows, tokens, matrix.size(0), -1, False))
    else:
        matrix.index_add_(0, tokens, rows)
