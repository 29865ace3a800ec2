"""Shards of a tensor, cut by tensor parallelism and by ZeRO, have the numbers that cutting the tensor gives."""

from itertools import product

import pytest
import torch
from torch import Tensor

from hvd_transformer.checkpoint.shards import StridedBlocks, TensorShard, copy_overlap
from hvd_transformer.parallel.tensor_parallel import piece

CASES = [
    ((12, 5), None, 1),
    ((12, 5), (0, 1), 3),
    ((12, 5), (0, 3), 2),  # three stacked matrices
    ((5, 12), (1, 1), 4),
    ((5, 12), (1, 3), 2),
    ((7, 3), (0, 1), 2),  # a vocabulary that the ranks do not divide
    ((5, 7), (1, 1), 3),
    ((11,), (0, 1), 4),
    ((4, 6, 5), (1, 2), 3),
]


def cut(whole: Tensor, split: tuple[int, int] | None, count: int, shards: int) -> list[TensorShard]:
    """The shards of all ranks."""
    found = []
    for index in range(count):
        own = (whole if split is None else piece(whole, split, index, count)).flatten()
        length = -(-own.numel() // shards)
        blocks = StridedBlocks.of(whole.shape, split, index, count)
        found += [
            TensorShard(tuple(whole.shape), blocks, k * length, own[k * length :][:length]) for k in range(shards)
        ]
    return found


@pytest.mark.parametrize(("shape", "split", "count"), CASES)
def test_a_piece_has_the_numbers_that_cutting_the_tensor_gives(shape, split, count) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for shard in cut(whole, split, count, 1):
        places, stride = [], shard.blocks.stride
        for top, bottom, left, right in shard.blocks.rectangles(0, shard.stop):
            places += [row * stride + column for row, column in product(range(top, bottom), range(left, right))]
        assert places == shard.values.tolist()
        for place in range(whole.numel() + 1):
            assert shard.blocks.before(place) == sum(number < place for number in places)
            assert shard.between(3, place).tolist() == [number for number in places if 3 <= number < place]


@pytest.mark.parametrize(("shape", "split", "count"), CASES)
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("others", [1, 2, 3])
def test_any_cut_is_made_from_any_other(shape, split, count, shards, others) -> None:
    whole = torch.randn(shape)
    for wanted_split, wanted_count in ((None, 1), (split, others)):
        for wanted in cut(whole, wanted_split, wanted_count if wanted_split else 1, 3):
            found = TensorShard(wanted.shape, wanted.blocks, wanted.start, torch.full_like(wanted.values, torch.nan))
            for source in cut(whole, split, count, shards):
                copy_overlap(found, source)
            assert torch.equal(found.values, wanted.values)


def test_rows_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(rows: int) -> int:
        whole, calls = torch.randn(rows, 8), []
        real = torch.Tensor.copy_
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", lambda self, source: calls.append(1) or real(self, source))
            target = cut(torch.empty_like(whole), None, 1, 1)[0]
            for source in cut(whole, (1, 1), 2, 3):
                copy_overlap(target, source)
        assert torch.equal(target.values.view_as(whole), whole)
        return len(calls)

    assert copies(1000) == copies(10) <= 2 * 3 * 3
