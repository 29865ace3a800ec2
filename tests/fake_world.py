"""A world of several ranks in one process: it writes down what is called and plays the others itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World


class FakeWorld(World):
    """Rank `rank` of `size`.

    The other ranks hold the same tensors and objects as this one; a sum is there only after its wait.
    `thread_world` has ranks that differ.
    """

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        super().__init__()
        self.rank, self.size, self.ranks = rank, size, list(range(size))
        self.hosts = [self.host] * size
        self.events: list[str] = []
        self.sent: dict[str, Tensor] = {}  # as they were when they were sent
        self.bytes = 0  # of all that was sent

    def group(self, ranks: Sequence[int], *, prompt: bool = False) -> Group:
        return self if len(ranks) == self.size else super().group(ranks, prompt=prompt)

    def _note(self, tensor: Tensor, name: str) -> None:
        self.events.append(f"send {name}")
        self.sent[name] = tensor.detach().clone()
        self.bytes += tensor.nbytes

    def all_reduce_async_(self, tensor: Tensor, name: str, operation: str = "sum") -> Callable[[], Tensor]:
        assert tensor.is_contiguous()
        self._note(tensor, name)

        def wait() -> Tensor:
            self.events.append(f"wait {name}")
            if operation == "sum":
                tensor.mul_(self.size)
            return tensor

        return wait

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        assert tensor.is_contiguous() and tensor.ndim == 1 and tensor.numel() % self.size == 0
        self._note(tensor, name)

        def wait() -> Tensor:
            self.events.append(f"wait {name}")
            return tensor.view(self.size, -1)[self.rank] * self.size

        return wait

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        assert tensor.is_contiguous()
        self._note(tensor, name)

        def wait() -> Tensor:
            self.events.append(f"wait {name}")
            return torch.cat([tensor] * self.size)

        return wait

    def broadcast_(self, tensor: Tensor, name: str, root: int = 0) -> Tensor:
        """Rank 0 sends ones where this is another rank."""
        self.events.append(f"broadcast {name}")
        return tensor if self.rank == root else tensor.copy_(torch.ones_like(tensor))

    def all_to_all_async(
        self, tensor: Tensor, name: str, splits: Sequence[int] | None = None
    ) -> Callable[[], tuple[Tensor, Sequence[int]]]:
        """Each of the others sends as much as it gets: with unequal splits, the first rows."""
        assert tensor.is_contiguous()
        self._note(tensor, name)
        sizes = list(splits or [tensor.size(0) // self.size] * self.size)
        own = tensor.split(sizes)[self.rank]

        def wait() -> tuple[Tensor, Sequence[int]]:
            self.events.append(f"wait {name}")
            return torch.cat([own if size == len(own) else tensor[:size] for size in sizes]), sizes

        return wait

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self.events.append("broadcast object")
        return value

    def first_object(self, value: Any) -> tuple[int, Any] | None:
        """Every rank has this one's value, so that it is rank 0's."""
        self.events.append("first object")
        return None if value is None else (0, value)

    def gather_objects(self, value: Any) -> list[Any]:
        self.events.append("gather objects")
        return [] if self.rank else [value] * self.size

    def all_gather_objects(self, value: Any) -> list[Any]:
        self.events.append("gather")
        return [value] * self.size
