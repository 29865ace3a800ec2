"""What the ranks have of a tensor is, together and each once, the whole of it."""

import pytest
import torch

from hvd_transformer.checkpoint.tensor_file import StridedBlocks, TensorShard
from hvd_transformer.parallel.tensor_group import piece

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


@pytest.mark.parametrize(("shape", "cut", "count"), CASES)
def test_a_piece_has_the_numbers_that_cutting_the_tensor_gives(shape, cut, count) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for index in range(count):
        own = whole if cut is None else piece(whole, cut, index, count)
        blocks = StridedBlocks.of(shape, cut, index, count)
        places = [0] * own.numel()
        for place, run in TensorShard(shape, blocks, 0, torch.arange(own.numel())).runs(0, whole.numel()):
            for number, position in enumerate(run.tolist()):
                places[position] = place + number
        assert places == own.flatten().tolist()
        for place in range(whole.numel() + 1):
            assert blocks.before(place) == sum(number < place for number in places)


@pytest.mark.parametrize(("shape", "cut", "count"), CASES)
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_all_ranks_fragments_make_the_whole_and_take_it_apart(shape, cut, count, shards, step) -> None:
    whole = torch.randn(shape)
    flat, written, times = whole.flatten(), torch.zeros(whole.numel()), torch.zeros(whole.numel())
    for index in range(count):
        own = (whole if cut is None else piece(whole, cut, index, count)).flatten()
        length = -(-own.numel() // shards)
        for shard in range(shards):
            values = own[shard * length :][:length]
            fragment = TensorShard(shape, StridedBlocks.of(shape, cut, index, count), shard * length, values)
            read = TensorShard(shape, fragment.blocks, shard * length, torch.zeros(len(values)))
            for first in range(0, whole.numel(), step):
                last = min(first + step, whole.numel())
                for place, run in fragment.runs(first, last):
                    assert first <= place and place + run.numel() <= last
                    written[place : place + run.numel()] = run
                    times[place : place + run.numel()] += 1
                for place, run in read.runs(first, last):
                    run.copy_(flat[place : place + run.numel()])
            assert torch.equal(read.values, values)
    assert torch.equal(written.view(shape), whole) and bool((times == 1).all())
