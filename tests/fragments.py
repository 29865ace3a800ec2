"""Whole tensors as one rank's part of a checkpoint, and back."""

from collections.abc import Mapping

from torch import Tensor

from hvd_transformer.checkpoint.store import Snapshot
from hvd_transformer.checkpoint.tensor_file import StridedBlocks, TensorShard


def whole(tensors: Mapping[str, Tensor]) -> dict[str, TensorShard]:
    return {
        name: TensorShard(tuple(tensor.shape), StridedBlocks(tensor.numel(), tensor.numel(), 0), 0, tensor.flatten())
        for name, tensor in tensors.items()
    }


def tensors_of(taken: Snapshot) -> dict[str, dict[str, Tensor]]:
    """Of a snapshot whose fragments are whole: by file and name."""
    return {
        file: {name: own.values.view(own.shape) for name, own in fragments.items()}
        for file, fragments in taken.tensors.items()
    }
