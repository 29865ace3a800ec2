"""Several ranks write one safetensors file, which any reader reads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hvd_transformer.checkpoint import tensor_file
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.tensor_file import StridedBlocks, TensorShard
from hvd_transformer.parallel.tensor_group import piece

CUTS = {"rows": (0, 1), "columns": (1, 1), "stacked": (0, 3), "alike": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_pieces_written_side_by_side_make_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    count, file = 2, tmp_path / "model.safetensors"
    wholes = {name: torch.randn(6, 8).to(dtype) for name in CUTS} | {"bias": torch.randn(3).to(dtype)}
    parts = []
    for rank in range(count):
        part = {}
        for name, whole in wholes.items():
            cut = CUTS.get(name)
            own = whole[:] if cut is None else piece(whole, cut, rank, count)
            values = own.flatten() if cut is not None or rank == 0 else own.flatten()[:0]
            part[name] = TensorShard(tuple(whole.shape), StridedBlocks.of(whole.shape, cut, rank, count), 0, values)
        parts.append(part)
    tensor_file.create(file, parts[0])
    assert not any(tensor.any() for tensor in load_file(file).values())
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda part: tensor_file.write(file, part), parts))
    found = load_file(file)
    assert found.keys() == wholes.keys()
    for name, whole in wholes.items():
        assert torch.equal(found[name], whole), name
    tensor_file.check(file, {name: whole.shape for name, whole in wholes.items()})


def test_a_file_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    fragments = {"w": TensorShard.whole(torch.ones(2))}
    tensor_file.create(tmp_path / "file", fragments)
    with pytest.raises(FileExistsError):
        tensor_file.create(tmp_path / "file", fragments)


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(DamagedCheckpoint, match=f"{tmp_path / 'file'}: no valid safetensors file"):
        list(tensor_file.read(tmp_path / "file", [("w", 0, 1)]))
