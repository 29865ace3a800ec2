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


class EmbeddingGrad:
    """The rows of one parameter [V, D] in one step: implements `EmbeddingGrads`.

    Backward calls `put`; then either `add`, or `send` and `add_gathered`. `name` is that of the rows on the wire.
    """

    def __init__(self, parameter: Tensor, name: str, wire: Wire) -> None:
        self.parameter, self.name, self.wire = parameter, name, wire
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._gathered: list[Callable[[], Tensor]] = []

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        self._rows.append((tokens, rows))

    def clear(self) -> None:
        """Drop what an unfinished step left."""
        self._rows.clear()

    def add(self, matrix: Tensor) -> None:
        """Add this rank's rows to `matrix` [V, D], which is then sent as a whole."""
        _add_rows(matrix, *self._take())

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
        if not self._rows:  # a rank without samples
            return like.new_empty(0, dtype=torch.int64), like.new_empty(0, like.size(1))
        tokens, rows = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        self.clear()
        return tokens.to(like.device), rows.to(like.device, like.dtype)  # a tied matrix is on its last stage's device


def _add_rows(matrix: Tensor, tokens: Tensor, rows: Tensor) -> None:
    rows = rows.to(matrix.dtype)
    if matrix.is_cuda:  # index_add_ is not deterministic on GPUs, embedding's own backward is
        matrix.add_(torch.ops.aten.embedding_dense_backward(rows, tokens, matrix.size(0), -1, False))
    else:
        matrix.index_add_(0, tokens, rows)
