"""Which embeddings send the gradient of their lookups as rows."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from hvd_transformer.models.embedding import Embedding


@dataclass
class RowParameter:
    """A weight whose lookups travel as rows."""

    embeddings: list[Embedding] = field(default_factory=list)  # more than one where they share the weight
    dense: bool = False  # another layer uses the weight, too: it is tied


def row_parameters(
    model: nn.Module, choice: Literal["auto", "always", "never"], num_tokens: int
) -> dict[str, RowParameter]:
    """By parameter name, those of a model that looks up `num_tokens` tokens a step over all ranks.

    Gathering N rows sends about N × D numbers, summing a matrix of V rows twice V × D: "auto" takes rows while N < V.
    """
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    result: dict[str, RowParameter] = {}
    for module in model.modules():
        if not isinstance(module, Embedding) or id(module.weight) not in names:
            continue
        if choice == "always" or (choice == "auto" and num_tokens < module.num_embeddings):
            row = result.setdefault(names[id(module.weight)], RowParameter())
            row.embeddings.append(module)
            row.dense = users[id(module.weight)] > len(row.embeddings)
    return result
