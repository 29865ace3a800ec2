"""Calls of a pipeline's layers outside of the pipeline, as decoding makes them: each token goes through all stages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hvd_transformer.parallel.pipeline import Stage


@contextmanager
def inputs_moved(stages: Sequence[Stage]) -> Iterator[None]:
    """Make the module of each layer move its input tensors to the device of its stage, inside the context.

    If all stages are on one device, nothing changes.
    """
    hooks = []
    if len({stage.device for stage in stages}) > 1:
        for stage in stages:
            move = partial(_move, stage.device)
            hooks += [layer.module.register_forward_pre_hook(move, with_kwargs=True) for layer in stage.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _move(
    device: torch.device, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
        Tensor, lambda tensor: tensor.to(device), (args, kwargs)
    )
    return moved
