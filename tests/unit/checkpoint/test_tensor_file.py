"""The shards of all ranks make whole tensors, each element once, in one safetensors file that any reader reads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fragments import whole as whole_shards
from safetensors.torch import load_file

from hvd_transformer.checkpoint import tensor_file
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.tensor_file import StridedBlocks, TensorShard
from hvd_transformer.parallel.tensor_parallel import piece

SPLITS = {"rows": (0, 1), "columns": (1, 1), "stacked": (0, 3), "alike": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_pieces_written_side_by_side_make_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    count, file = 2, tmp_path / "model.safetensors"
    wholes = {name: torch.randn(6, 8).to(dtype) for name in SPLITS} | {"bias": torch.randn(3).to(dtype)}
    parts = []
    for rank in range(count):
        part = {}
        for name, whole in wholes.items():
            split = SPLITS.get(name)
            own = whole[:] if split is None else piece(whole, split, rank, count)
            values = own.flatten() if split is not None or rank == 0 else own.flatten()[:0]
            part[name] = TensorShard(tuple(whole.shape), StridedBlocks.of(whole.shape, split, rank, count), 0, values)
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
    shards = whole_shards({"w": torch.ones(2)})
    tensor_file.create(tmp_path / "file", shards)
    with pytest.raises(FileExistsError):
        tensor_file.create(tmp_path / "file", shards)


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(DamagedCheckpoint, match=f"{tmp_path / 'file'}: no valid safetensors file"):
        list(tensor_file.read(tmp_path / "file", [("w", 0, 1)]))


CASES = [
    ((12, 5), None, 1),
    ((12, 5), (0, 1), 3),
    ((12, 5), (0, 3), 2),  # three stacked matrices
    ((5, 12), (1, 1), 4),
    ((5, 12), (1, 3), 2),
    ((7, 3), (0, 1), 2),  # a vocabulary that the ranks do not divide
    ((11,), (0, 1), 4),
    ((4, 6, 5), (1, 2), 3),
]


@pytest.mark.parametrize(("shape", "split", "count"), CASES)
def test_a_piece_has_the_numbers_that_cutting_the_tensor_gives(shape, split, count) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for index in range(count):
        own = whole if split is None else piece(whole, split, index, count)
        blocks = StridedBlocks.of(shape, split, index, count)
        places = [0] * own.numel()
        for place, run in TensorShard(shape, blocks, 0, torch.arange(own.numel())).runs(0, whole.numel()):
            for number, position in enumerate(run.tolist()):
                places[position] = place + number
        assert places == own.flatten().tolist()
        for place in range(whole.numel() + 1):
            assert blocks.before(place) == sum(number < place for number in places)


@pytest.mark.parametrize(("shape", "split", "count"), CASES)
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_all_ranks_shards_make_the_whole_and_take_it_apart(shape, split, count, shards, step) -> None:
    whole = torch.randn(shape)
    flat, written, times = whole.flatten(), torch.zeros(whole.numel()), torch.zeros(whole.numel())
    for index in range(count):
        own = (whole if split is None else piece(whole, split, index, count)).flatten()
        length = -(-own.numel() // shards)
        for shard in range(shards):
            values = own[shard * length :][:length]
            own_shard = TensorShard(shape, StridedBlocks.of(shape, split, index, count), shard * length, values)
            read = TensorShard(shape, own_shard.blocks, shard * length, torch.zeros(len(values)))
            for first in range(0, whole.numel(), step):
                last = min(first + step, whole.numel())
                for place, run in own_shard.runs(first, last):
                    assert first <= place and place + run.numel() <= last
                    written[place : place + run.numel()] = run
                    times[place : place + run.numel()] += 1
                for place, run in read.runs(first, last):
                    run.copy_(flat[place : place + run.numel()])
            assert torch.equal(read.values, values)
    assert torch.equal(written.view(shape), whole) and bool((times == 1).all())
