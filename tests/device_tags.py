"""Several devices on a CPU: each tensor of this thread has a tag, the device that it would be on.

An operation on tensors of different devices fails, as it would between GPUs; only an explicit move changes the device.
Numbers that lie on no device, such as 0-dimensional ones, go anywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

DEVICES = (torch.device("cpu", 0), torch.device("cpu", 1))
_GET_DEVICE, _SET_DATA = Tensor.device.__get__, Tensor.data.__set__
_MOVES = (Tensor.to, Tensor.cpu, Tensor.copy_)
_OF_MODULE_TO = (torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type)
HOST = torch.device("cpu")


class SeveralDevices(TorchFunctionMode):
    """Inside, "cpu:0" and "cpu:1" are devices apart from each other and from "cpu"."""

    def __init__(self) -> None:
        super().__init__()
        self.of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.moves = 0  # between the two devices

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GET_DEVICE:
            return self.of.get(args[0], HOST)
        if func in _OF_MODULE_TO:
            return func(*args, **kwargs)
        wanted = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {self.of.get(tensor, HOST) for tensor in given if tensor.ndim}
        if len(devices) > 1 and func not in (*_MOVES, _SET_DATA):
            raise RuntimeError(f"{func.__name__}: tensors on {' and '.join(sorted(map(str, devices)))}")
        plain = tree_map(lambda leaf: HOST if isinstance(leaf, torch.device) else leaf, (list(args), kwargs))
        result = func(*plain[0], **plain[1])
        if func == _SET_DATA:
            self.of[args[0]] = self.of.get(args[1], HOST)
            return result
        device = wanted[0] if wanted else HOST if func is Tensor.cpu else next(iter(devices), HOST)
        if func is Tensor.to and not wanted:
            device = self.of.get(given[-1], HOST)
        if func is Tensor.copy_:
            device = self.of.get(args[0], HOST)
        if func in (Tensor.to, Tensor.cpu) and device != self.of.get(args[0], HOST):
            self.moves += HOST not in (device, self.of.get(args[0], HOST))
            result = result.clone() if result is args[0] else result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.of[tensor] = device
        return result
