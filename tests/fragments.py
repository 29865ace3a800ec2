"""Whole tensors as one rank's part of a checkpoint, and back."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hvd_transformer.checkpoint.store import Snapshot
from hvd_transformer.checkpoint.tensor_file import Entry, FilePart


def whole(tensors: Mapping[str, Tensor]) -> FilePart:
    """A file that one rank writes alone."""
    flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors.values()]
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return FilePart(entries, [(0, torch.cat(flat))] if flat else [])


def tensors_of(taken: Snapshot) -> dict[str, dict[str, Tensor]]:
    """Of a snapshot that one rank took: by file and name."""
    found: dict[str, dict[str, Tensor]] = {}
    for file, part in taken.parts.items():
        values = torch.cat([torch.empty(0, dtype=torch.uint8), *(block for _, block in part.blocks)]).split(
            [entry.nbytes for entry in part.entries]
        )
        found[file] = {
            entry.key: value.clone().view(entry.dtype).view(entry.shape)
            for entry, value in zip(part.entries, values, strict=True)
        }
    return found
