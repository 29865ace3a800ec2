"""Counts the bytes of tensors that are alive, real or fake."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """What this thread's operations make while inside, as long as it lives.

    A storage counts once, whichever tensors share it. What a kernel takes and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._lock = threading.RLock()  # another thread may be the one that lets go

    def take_peak(self) -> int:
        """Since the last call."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result) - _storages((args, kwargs)):
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.now += num_bytes
            self.peak = max(self.peak, self.now)


def _storages(tree: object) -> set[UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
