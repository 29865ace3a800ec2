"""Cuts a model for the ranks of its tensor group, and gives its layers the other ranks."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from hvd_transformer.models.dropout import Dropout
from hvd_transformer.models.linear import Linear
from hvd_transformer.models.shares import Cut, Part, Shares
from hvd_transformer.parallel.layout import Layout
from hvd_transformer.parallel.tensor import SilentShares, TensorShares, cut_weights, span
from hvd_transformer.training.task import Task

Shapes = Mapping[str, Sequence[int]]  # of the whole weights


def cut_model(task: Task, cuts: Mapping[str, Cut], layout: Layout, shapes: Shapes) -> None:
    """Leaves the model its rank's shares of the weights. Until `connect` its layers compute with these alone."""
    if layout.tp == 1:
        return
    cut_weights(task.model, cuts, layout.shard, layout.tp)
    share_layers(task.model, cuts, shapes, lambda _: SilentShares(layout.shard, layout.tp))
    for name in task.dropping_shares:
        dropout = task.model.get_submodule(name)
        assert isinstance(dropout, Dropout)
        dropout.share = layout.shard


def connect(task: Task, cuts: Mapping[str, Cut], layout: Layout, shapes: Shapes) -> None:
    """From now on the layers add up with the other ranks of the tensor group."""
    if layout.tp > 1:
        share_layers(task.model, cuts, shapes, lambda name: TensorShares(layout.tensor_group, name))


def share_layers(model: nn.Module, cuts: Mapping[str, Cut], shapes: Shapes, shares_of: Callable[[str], Shares]) -> None:
    """Gives each layer whose weight was cut so the shares by its name; those before are forgotten."""
    weights = {id(weight): (cuts[name], shapes[name]) for name, weight in model.named_parameters() if name in cuts}
    for name, layer in model.named_modules():
        found = weights.get(id(layer._parameters.get("weight")))  # tied ones have a name for one layer alone
        if found is None:
            continue
        cut, whole = found
        shares = shares_of(name)
        if not isinstance(layer, Linear):
            layer.part = Part(shares, span(whole[0], shares.index, shares.count), whole[0])
        elif cut.dim == 0:
            layer.column = shares
        else:
            layer.row = shares
