"""Tensors of a GPU that need none: which operators they are given to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func).removeprefix("aten."))
        # A torch without CUDA has no form of it for fake tensors.
        return kwargs["out"] if kwargs and "out" in kwargs else func(*args, **(kwargs or {}))


@contextmanager
def operators_called() -> Iterator[list[str]]:
    """Tensors made inside may be on `GPU`, and compute nothing; the names of the operators, as they are called."""
    called = _Called()
    with FakeTensorMode(), called:
        yield called.operators
