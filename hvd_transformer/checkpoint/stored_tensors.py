"""Reads the tensors of a checkpoint by name, from one file or from the files that an index names."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from hvd_transformer.checkpoint import tensor_file
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.shards import StridedBlocks, TensorShard, copy_overlap
from hvd_transformer.checkpoint.tensor_file import StoredTensor
from hvd_transformer.errors import UserError


class _Part(NamedTuple):
    """A stored tensor of a file, and what it holds of the whole one; no `blocks`: it is the whole one."""

    file: str
    key: str
    blocks: StridedBlocks | None = None
    start: int = 0
    length: int = 0


class StoredTensors:
    """The model's tensors or the optimizer's in a checkpoint or exported folder; `name` is that of the only file.

    With `indexed`, an index beside it counts instead. Files are mapped, not read: a page of a file is read when a
    number in it is used.
    """

    def __init__(self, folder: Path, name: str, *, indexed: bool = True) -> None:
        self._folder, self._opened = folder, dict[str, dict[str, StoredTensor]]()
        self._index = folder / f"{name}.index.json"
        self.path = self._index if indexed and self._index.is_file() else folder / name
        self._shapes: dict[str, tuple[int, ...]] = {}
        if self.path == self._index:
            self._parts = self._read_index()
        else:
            self._parts = {key: [_Part(name, key)] for key in self._file(name)}

    @property
    def names(self) -> list[str]:
        return sorted(self._parts)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise `UserError` if the names or shapes differ from `shapes`."""
        if differing := sorted(set(self._parts) ^ set(shapes)):
            where = "in the model but not in the file" if differing[0] in shapes else "in the file but not in the model"
            raise UserError(f"{self.path}: of another model: {differing[0]} is {where}")
        for name, shape in shapes.items():
            found = self.shape(name)
            if list(found) != list(shape):
                raise UserError(f"{self.path}: of another model: {name} is {list(found)}, not {list(shape)}")

    def fill(self, name: str, shard: TensorShard) -> None:
        """Read the shard's elements of a tensor into its values."""
        for part in self._parts[name]:
            stored = self._stored(part)
            blocks = part.blocks or StridedBlocks.of(stored.shape)
            copy_overlap(shard, TensorShard(shard.shape, blocks, part.start, stored.values))

    def whole(self, name: str) -> Tensor:
        """A whole tensor, in memory."""
        shape = self.shape(name)
        shard = TensorShard(
            shape, StridedBlocks.of(shape), 0, self._stored(self._parts[name][0]).values.new_empty(prod(shape))
        )
        self.fill(name, shard)
        return shard.values.view(shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._shapes[name] if name in self._shapes else self._stored(self._parts[name][0]).shape

    def _stored(self, part: _Part) -> StoredTensor:
        found = self._file(part.file).get(part.key)
        if found is None or part.blocks is not None and found.values.numel() != part.length:
            raise DamagedCheckpoint(f"{self._folder / part.file}: not what {self._index.name} says of {part.key}")
        return found

    def _file(self, name: str) -> dict[str, StoredTensor]:
        if name not in self._opened:
            self._opened[name] = tensor_file.read(self._folder / name)
        return self._opened[name]

    def _read_index(self) -> dict[str, list[_Part]]:
        try:
            index = json.loads(self._index.read_text(encoding="utf-8"))
            found = {str(name): [_Part(_inside(file), str(name))] for name, file in index["weight_map"].items()}
            for name, entry in index.get("pieces", {}).items():
                self._shapes[name] = tuple(map(int, entry["shape"]))
                found[name] = [
                    _Part(
                        _inside(part["file"]), str(part["tensor"]), StridedBlocks(*map(int, part["blocks"])),
                        int(part["start"]), int(part["count"]),
                    )
                    for part in entry["parts"]
                ]  # fmt: skip
                if sum(part.length for part in found[name]) != prod(self._shapes[name]):
                    raise ValueError(f"the parts of {name} do not add up to it")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{self._index}: damaged: {error}") from None
        return found


def _inside(file: object) -> str:
    """The name of a file in the folder itself."""
    name = str(file)
    if Path(name).name != name:
        raise ValueError(f"{name} is in another folder")
    return name
