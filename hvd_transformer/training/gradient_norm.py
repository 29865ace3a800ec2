"""The norm of all gradients, over stages, the shares of a tensor group and the shards of the replicas."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from hvd_transformer.comm.world import World
from hvd_transformer.parallel.layout import Layout


class GradientNorm:
    """Joins the norms of the parameters' own gradients in the model's order: stages and buckets change no bit."""

    def __init__(
        self, names: Sequence[str], shared: Collection[str], dtype: torch.dtype, layout: Layout, world: World
    ) -> None:
        self.device, self.size = layout.device, len(names)
        self._nothing = torch.zeros((), dtype=dtype, device=self.device)
        self._group = world if layout.update_shard.count > 1 else layout.tensor_group
        # Each share of a weight counts, and a weight that all ranks of a tensor group have counts once.
        self._counts = torch.tensor([layout.shard == 0 or name in shared for name in names], device=layout.device)

    def __call__(self, own: Mapping[int, Tensor]) -> float:
        """`own`: by the parameter's number, of what this rank has of its gradient. Collective."""
        joined = torch.stack([own.get(number, self._nothing).to(self.device) for number in range(self.size)])
        if self._group.size == 1:
            return float(torch.linalg.vector_norm(joined))
        squares = self._group.all_reduce_((joined * self._counts).square(), "norms")
        return float(squares.sum().sqrt())
