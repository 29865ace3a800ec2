"""Cuts a model for the ranks of its tensor group, and gives its layers the other ranks."""

from collections.abc import Callable, Mapping

from torch import nn

from hvd_transformer.models.dropout import Dropout
from hvd_transformer.models.linear import Linear
from hvd_transformer.models.shares import Cut, Part, Shares
from hvd_transformer.parallel.layout import Layout
from hvd_transformer.parallel.tensor import SilentShares, TensorShares, cut_weights, span
from hvd_transformer.training.task import Task


def cut_model(task: Task, layout: Layout) -> None:
    """Leaves the model its rank's shares of the weights. Until `connect` its layers compute with these alone."""
    if layout.tp == 1:
        return
    cut_weights(task.model, task.cuts, layout.shard, layout.tp)
    share_layers(task.model, task.cuts, task.vocab_size, lambda _: SilentShares(layout.shard, layout.tp))
    for name in task.dropping_shares:
        dropout = task.model.get_submodule(name)
        assert isinstance(dropout, Dropout)
        dropout.share = layout.shard


def connect(task: Task, layout: Layout) -> None:
    """From now on the layers add up with the other ranks of the tensor group."""
    if layout.tp > 1:
        share_layers(task.model, task.cuts, task.vocab_size, lambda name: TensorShares(layout.tensor_group, name))


def share_layers(
    model: nn.Module, cuts: Mapping[str, Cut], vocab_size: int, shares_of: Callable[[str], Shares]
) -> None:
    """Gives each layer whose weight was cut so the shares by its name; those before are forgotten."""
    weights = {id(weight): cuts[name] for name, weight in model.named_parameters() if name in cuts}
    for name, layer in model.named_modules():
        cut = weights.get(id(layer._parameters.get("weight")))  # tied ones have a name for one layer alone
        if cut is None:
            continue
        shares = shares_of(name)
        if not isinstance(layer, Linear):
            layer.part = Part(shares, span(vocab_size, shares.index, shares.count))
        elif cut.dim == 0:
            layer.column = shares
        else:
            layer.row = shares
