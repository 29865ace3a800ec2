"""Has the gradients of matrices multiplied right into their buckets, when their stage has time for it."""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from hvd_transformer.models.embedding import Embedding
from hvd_transformer.models.linear import Product
from hvd_transformer.parallel.later import Later
from hvd_transformer.parallel.pipeline import Stage
from hvd_transformer.parallel.reducer import GradientReducer


def take_products(model: nn.Module, stages: Iterable[tuple[Stage, Later]], reducer: GradientReducer) -> None:
    """Of the stages' layers, lookups' apart. Weights that modules share, or that are not trained, are left to
    autograd."""
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    users = Counter(
        id(weight)
        for module in model.modules()
        if not isinstance(module, Embedding)  # which gives rows
        for weight in module.parameters(recurse=False)
    )
    for module, later in (
        (module, later) for stage, later in stages for layer in stage.layers for module in layer.module.modules()
    ):
        own = list(module.parameters(recurse=False))
        if isinstance(module, Product) and all(id(weight) in names and users[id(weight)] == 1 for weight in own):
            bias = None if module.bias is None else names[id(module.bias)]
            module.take_product = reducer.take_product(names[id(module.weight)], bias, later)
