"""Counts the tensors that autograd keeps for backward."""

from collections.abc import Sequence

import torch
from torch import Tensor


class SavedTensors:
    """Counts the bytes that autograd saves in the thread that enters it, until that leaves; weights do not count."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._users: dict[int, int] = {}  # of each storage, by its address
        self._bytes = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def enter(self) -> None:
        self._hooks.__enter__()

    def leave(self) -> None:
        self._hooks.__exit__()

    def add(self, address: int, size: int) -> None:
        self._users[address] = self._users.get(address, 0) + 1
        if self._users[address] == 1 and address not in self._weights:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)

    def remove(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if self._users[address] == 0 and address not in self._weights:
            self._bytes -= size

    def take_peak(self) -> int:
        """Since the last call."""
        peak, self.peak = self.peak, self._bytes
        return peak

    def _pack(self, tensor: Tensor) -> "_Saved":
        return _Saved(self, tensor)


class _Saved:
    """One saved tensor, until autograd lets go of it."""

    def __init__(self, counter: SavedTensors, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._counter, self._place = tensor, counter, (storage.data_ptr(), storage.nbytes())
        counter.add(*self._place)

    def __del__(self) -> None:
        self._counter.remove(*self._place)
