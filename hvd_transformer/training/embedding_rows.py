"""How the gradient of each embedding's lookups goes: as rows to all ranks, or added to the matrix first."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from hvd_transformer.models.embedding import Embedding
from hvd_transformer.parallel.rows import RowPlan


@dataclass
class RowParameter:
    """A weight that is looked up."""

    gather: bool  # the rows travel
    embeddings: list[Embedding] = field(default_factory=list)  # more than one where they share the weight
    dense: bool = False  # another layer uses the weight, too: it is tied

    @property
    def plan(self) -> RowPlan:
        return RowPlan(self.dense, self.gather)


def row_parameters(
    model: nn.Module, choice: Literal["auto", "always", "never"], num_tokens: int
) -> dict[str, RowParameter]:
    """By parameter name, the embeddings of a model that looks up `num_tokens` tokens a step over all ranks.

    Gathering N rows sends about N × D numbers, summing a matrix of V rows twice V × D: "auto" takes rows while N < V.
    """
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    result: dict[str, RowParameter] = {}
    for module in model.modules():
        if not isinstance(module, Embedding) or id(module.weight) not in names:
            continue
        gather = choice == "always" or (choice == "auto" and num_tokens < module.weight.size(0))
        row = result.setdefault(names[id(module.weight)], RowParameter(gather))
        row.embeddings.append(module)
        row.dense = users[id(module.weight)] > len(row.embeddings)
    return result
