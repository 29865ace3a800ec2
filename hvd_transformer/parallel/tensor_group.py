"""Weights cut for the ranks of a tensor group, joined again, and what the cut layers tell each other.

A cut is (dimension, parts): a weight that stacks `parts` matrices along that dimension gives each rank its piece of
every one of them.

    [ query | key | value ]   cut for two ranks   [ q0 | k0 | v0 ]   [ q1 | k1 | v1 ]
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.nn.contracts import TensorGroup, TensorSplit
from hvd_transformer.nn.dropout import Dropout
from hvd_transformer.nn.parallel_layers import Linear, VocabShard
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.tasks.task import Task

Cuts = Mapping[str, tuple[int, int]]  # by parameter
# Sums of one layer that can be on their way at once; their names are used again, so that Horovod knows them.
_NAMES = 4


def span(size: int, index: int, count: int) -> range:
    """The places of one piece of so many: as even as can be."""
    return range(size * index // count, size * (index + 1) // count)


def piece(whole: Tensor, cut: tuple[int, int], index: int, count: int) -> Tensor:
    """A view of the piece for rank `index` of `count`."""
    dim, parts = cut
    stacked: Tensor = whole.unflatten(dim, (parts, -1))
    places = span(stacked.size(dim + 1), index, count)
    own: Tensor = stacked.narrow(dim + 1, places.start, len(places))
    return own.flatten(dim, dim + 1)


def join(pieces: Sequence[Tensor], cut: tuple[int, int]) -> Tensor:
    """The whole of all ranks' pieces."""
    dim, parts = cut
    return torch.cat([own.unflatten(dim, (parts, -1)) for own in pieces], dim + 1).flatten(dim, dim + 1)


def cut_weights(model: nn.Module, cuts: Cuts, index: int, count: int) -> None:
    """Leaves a model the pieces of rank `index`; parameters stay the same objects, so tied ones stay tied."""
    for name, weight in model.named_parameters():
        if name in cuts:
            weight.data = piece(weight.data, cuts[name], index, count).clone(memory_format=torch.contiguous_format)


class HorovodTensorGroup:
    """The other ranks' pieces of one layer, which `name`s its sums: implements `models.shares.Shares`."""

    def __init__(self, group: Group, name: str) -> None:
        self.index, self.count = group.rank, group.size
        self._group, self._name, self._calls = group, name, 0

    def sum_(self, values: Tensor) -> Callable[[], None]:
        if values.dtype != torch.bfloat16:
            return self._group.all_reduce_async_(values, self._next())
        wide = values.float()  # Horovod has no bfloat16
        wait = self._group.all_reduce_async_(wide, self._next())

        def arrive() -> None:
            wait()
            values.copy_(wide)

        return arrive

    def gather(self, values: Tensor) -> Tensor:
        return self._group.all_gather_async(values[None], self._next())()

    def _next(self) -> str:
        """A layer's calls follow each other on every rank alike."""
        self._calls = (self._calls + 1) % _NAMES
        return f"tensor.{self._name}.{self._calls}"


class LocalTensorGroup:
    """One piece alone: nothing is sent, and sums are its own values. To measure and to plan."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def sum_(self, values: Tensor) -> Callable[[], None]:
        return lambda: None

    def gather(self, values: Tensor) -> Tensor:
        return values[None]


Shapes = Mapping[str, Sequence[int]]  # of the whole weights


def shard_model(task: Task, cuts: Mapping[str, TensorSplit], layout: ParallelMesh, shapes: Shapes) -> None:
    """Leaves the model its rank's shares of the weights. Until `connect` its layers compute with these alone."""
    if layout.tp == 1:
        return
    cut_weights(task.model, cuts, layout.shard, layout.tp)
    share_layers(task.model, cuts, shapes, lambda _: LocalTensorGroup(layout.shard, layout.tp))
    for name in task.dropping_shares:
        dropout = task.model.get_submodule(name)
        assert isinstance(dropout, Dropout)
        dropout.share = layout.shard


def connect_tensor_group(task: Task, cuts: Mapping[str, TensorSplit], layout: ParallelMesh, shapes: Shapes) -> None:
    """From now on the layers add up with the other ranks of the tensor group."""
    if layout.tp > 1:
        share_layers(task.model, cuts, shapes, lambda name: HorovodTensorGroup(layout.tensor_group, name))


def share_layers(
    model: nn.Module, cuts: Mapping[str, TensorSplit], shapes: Shapes, shares_of: Callable[[str], TensorGroup]
) -> None:
    """Gives each layer whose weight was cut so the shares by its name; those before are forgotten."""
    weights = {id(weight): (cuts[name], shapes[name]) for name, weight in model.named_parameters() if name in cuts}
    for name, layer in model.named_modules():
        found = weights.get(id(layer._parameters.get("weight")))  # tied ones have a name for one layer alone
        if found is None:
            continue
        cut, whole = found
        shares = shares_of(name)
        if not isinstance(layer, Linear):
            layer.part = VocabShard(shares, span(whole[0], shares.index, shares.count), whole[0])
        elif cut.dim == 0:
            layer.column = shares
        else:
            layer.row = shares
