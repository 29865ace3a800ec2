"""A world of several ranks in one process: it writes down what is called and plays the others itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World


class FakeWorld(World):
    """Rank `rank` of `size`.

    The other ranks hold the same tensors as this one; a sum is there only after its wait. `others` turns this
    rank's object into the list of all ranks'.
    """

    def __init__(self, rank: int = 0, size: int = 2, others: Callable[[Any], list[Any]] | None = None) -> None:
        super().__init__()
        self.rank, self.size, self.ranks = rank, size, list(range(size))
        self.hosts = [self.host] * size
        self.events: list[str] = []
        self.sent: dict[str, Tensor] = {}  # as they were when they were sent
        self._others = others or (lambda value: [value] * size)

    def group(self, ranks: Sequence[int], *, prompt: bool = False) -> Group:
        return self if len(ranks) == self.size else super().group(ranks, prompt=prompt)

    def all_reduce_async_(self, tensor: Tensor, name: str, operation: str = "sum") -> Callable[[], Tensor]:
        assert tensor.is_contiguous()
        self.events.append(f"send {name}")
        self.sent[name] = tensor.detach().clone()

        def wait() -> Tensor:
            self.events.append(f"wait {name}")
            if operation == "sum":
                tensor.mul_(self.size)
            return tensor

        return wait

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        assert tensor.is_contiguous() and tensor.ndim == 1 and tensor.numel() % self.size == 0
        self.events.append(f"send {name}")
        self.sent[name] = tensor.detach().clone()

        def wait() -> Tensor:
            self.events.append(f"wait {name}")
            return tensor.view(self.size, -1)[self.rank] * self.size

        return wait

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        assert tensor.is_contiguous()
        self.events.append(f"send {name}")
        self.sent[name] = tensor.detach().clone()

        def wait() -> Tensor:
            self.events.append(f"wait {name}")
            return torch.cat([tensor] * self.size)

        return wait

    def all_to_all(self, tensor: Tensor, counts: Sequence[int], name: str) -> Tensor:
        """The others send as much as they get from this rank; to itself a rank sends nothing."""
        self.events.append(f"exchange {name}")
        return torch.cat([part for count in counts if count for part in [tensor[:count]]] or [tensor[:0]])

    def broadcast_(self, tensor: Tensor, name: str, root: int = 0) -> Tensor:
        """Rank 0 sends ones where this is another rank."""
        self.events.append(f"broadcast {name}")
        return tensor if self.rank == root else tensor.copy_(torch.ones_like(tensor))

    def all_gather_objects(self, value: Any) -> list[Any]:
        self.events.append("gather")
        return self._others(value)
