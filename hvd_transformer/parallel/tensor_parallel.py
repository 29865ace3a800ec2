"""Tensor parallelism: a model sharded over the ranks of a tensor group, and the collectives of its split layers.

A weight that stacks several matrices (`TensorSplit.parts`) gives each rank its piece of every one of them:

    [ query | key | value ]   split for two ranks   [ q0 | k0 | v0 ]   [ q1 | k1 | v1 ]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hvd_transformer.nn.contracts import TensorGroup, TensorSplit
from hvd_transformer.nn.dropout import Dropout
from hvd_transformer.nn.parallel_layers import SplitLayer, split_range
from hvd_transformer.parallel.deferred_init import DeferredInit

Splits = Mapping[str, TensorSplit]  # by parameter name
Shapes = Mapping[str, Sequence[int]]  # of the unsplit weights, by parameter name
# The most collectives of one layer in flight. Their names repeat, so that Horovod caches them.
_NAMES = 4


def piece(whole: Tensor, split: TensorSplit, index: int, count: int) -> Tensor:
    """A view of rank `index`'s piece, of `count`."""
    dim, parts = split
    stacked: Tensor = whole.unflatten(dim, (parts, -1))
    places = split_range(stacked.size(dim + 1), index, count)
    own: Tensor = stacked.narrow(dim + 1, places.start, len(places))
    return own.flatten(dim, dim + 1)


def shard_model(
    model: nn.Module, splits: Splits, index: int, count: int, init: DeferredInit | None = None, *, draw: bool = True
) -> Shapes:
    """Reduce the model to rank `index`'s pieces of the weights, of `count`. Returns the shapes of the unsplit weights.

    Weights that `init` has deferred are initialized here, one after the other; without `draw` they are zero. Parameters
    stay the same objects, so tied ones stay tied. Until `set_tensor_groups`, layers use this rank's pieces only.
    """
    shapes = {name: weight.shape for name, weight in model.named_parameters()}

    def own(name: str, whole: Tensor) -> Tensor:
        return piece(whole, splits[name], index, count) if name in splits and count > 1 else whole

    (init or DeferredInit()).materialize(model, own, draw=draw)
    if count > 1:
        set_tensor_groups(model, splits, shapes, lambda _: LocalTensorGroup(index, count))
        for module in model.modules():
            if splits and isinstance(module, Dropout) and module.sharded:
                module.shard_index = index
    return shapes


@torch.no_grad()
def load_pieces(model: nn.Module, splits: Splits, index: int, count: int, read: Callable[[str], Tensor]) -> None:
    """Give the weights of a sharded model rank `index`'s pieces of the whole ones that `read` returns by name."""
    for name, weight in model.named_parameters():
        whole = read(name)
        weight.copy_(piece(whole, splits[name], index, count) if name in splits and count > 1 else whole)


class Communicator(Protocol):
    """The collectives that a tensor group needs: `comm.group.Group`, or `comm.torch_group.TorchGroup`."""

    rank: int
    size: int
    has_bfloat16: bool

    def all_reduce_async_(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to sum a contiguous tensor over the ranks, in place; the function returned waits, and returns it."""

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Concatenate the ranks' contiguous tensors along the first dimension; the function returned waits."""


class RankTensorGroup:
    """The tensor group of the layer called `name`, one piece per rank of `ranks`: implements `TensorGroup`."""

    def __init__(self, ranks: Communicator, name: str) -> None:
        self.index, self.count = ranks.rank, ranks.size
        self._ranks, self._name, self._calls = ranks, name, 0

    def sum_(self, values: Tensor) -> Callable[[], object]:
        if values.dtype != torch.bfloat16 or self._ranks.has_bfloat16:
            return self._ranks.all_reduce_async_(values, self._next())
        wait = self._ranks.all_reduce_async_(values.float(), self._next())
        return lambda: values.copy_(wait())

    def gather(self, values: Tensor) -> Tensor:
        return self._ranks.all_gather_async(values[None], self._next())()

    def _next(self) -> str:
        """The name of the layer's next collective: equal on all ranks, which call them in the same order."""
        self._calls = (self._calls + 1) % _NAMES
        return f"tensor.{self._name}.{self._calls}"


class LocalTensorGroup:
    """A tensor group without communication, where sums are this rank's own values: to profile and to plan."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def sum_(self, values: Tensor) -> Callable[[], object]:
        return lambda: None

    def gather(self, values: Tensor) -> Tensor:
        return values[None]


def set_tensor_groups(model: nn.Module, splits: Splits, shapes: Shapes, group_of: Callable[[str], TensorGroup]) -> None:
    """Give each split layer the group that `group_of` returns for the layer's name."""
    whole = {id(weight): shapes[name] for name, weight in model.named_parameters() if name in splits}
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")  # a tied weight has a name in one layer only
        if isinstance(layer, SplitLayer) and id(weight) in whole:
            layer.set_tensor_group(group_of(name), whole[id(weight)])
