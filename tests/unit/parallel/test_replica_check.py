"""The checksum sees every bit and every place, and the ranks that differ are named."""

import pytest
import torch
from fake_world import FakeWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_world import make_worlds, on_ranks
from torch import Tensor, nn

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.buffers import GradBuffer, make_grad_buffers
from hvd_transformer.parallel.replica_check import ReplicasDiffer, broadcast_parameters, check_replicas, checksum

LONG = 2**21 + 12_345  # more than two of the pieces that it is summed in


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit of its memory the other way."""
    copy = tensor.clone()
    copy.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return copy


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from([torch.float32, torch.float64]))
def test_one_flipped_bit_changes_it(data: st.DataObject, dtype: torch.dtype) -> None:
    tensor = numbers(37, dtype)
    bit = data.draw(st.integers(0, tensor.nbytes * 8 - 1))
    assert checksum([tensor]) != checksum([flipped(tensor, bit)])


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**20, 2**21, LONG - 1])
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_flipped_bit_in_a_long_tensor_changes_it(place: int, bit: int) -> None:
    tensor = numbers(LONG)
    assert checksum([tensor]) != checksum([flipped(tensor, 32 * place + bit)])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_two_swapped_values_change_it(data: st.DataObject) -> None:
    tensor = numbers(50)
    first, second = data.draw(st.lists(st.integers(0, 49), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    assert checksum([tensor]) != checksum([swapped])


@pytest.mark.parametrize(("first", "second"), [(0, 2**20), (5, 2**21 + 5), (2**20, 2**21), (0, LONG - 1)])
def test_values_swapped_far_apart_change_it(first: int, second: int) -> None:
    tensor = numbers(LONG)
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    assert checksum([tensor]) != checksum([swapped])


def test_zero_and_minus_zero_differ_and_so_do_tensors_in_another_order() -> None:
    assert checksum([torch.zeros(3)]) != checksum([-torch.zeros(3)])
    first, second = numbers(20), numbers(20) + 1
    assert checksum([first, second]) != checksum([second, first])


@pytest.mark.parametrize("count", [1, 37, LONG])
def test_equal_tensors_have_equal_ones_wherever_they_lie(count: int) -> None:
    tensor = numbers(count)
    elsewhere = torch.cat([torch.ones(3), tensor])[3:]
    assert checksum([tensor]) == checksum([elsewhere]) == checksum([tensor.clone().requires_grad_()])
    assert 0 <= checksum([tensor]) < 2**64


def buckets() -> list[GradBuffer]:
    return make_grad_buffers({"a": nn.Parameter(numbers(9)), "b": nn.Parameter(numbers(4).double())}, set(), 1)


def test_equal_replicas_pass_with_the_same_checksum_on_all() -> None:
    found = {check_replicas(buckets(), FakeWorld(size=size), "step 1") for size in (1, 2, 4)}
    other = buckets()
    other[0].parameters[0] += 1
    assert len(found) == 1 and check_replicas(other, World(), "alone") not in found


def compared(common: str, shards: str, tensor: int, cut: set[str]) -> list[str | None]:
    """What each rank says of weights that differ by letter: those of all ranks, and those of a shard."""

    def compare(world: World) -> None:
        own = buckets()
        for bucket, letters in zip(sorted(own, key=lambda bucket: bucket.slots[0].name), (shards, common), strict=True):
            bucket.parameters[0] = ord(letters[world.rank])
        check_replicas(own, world, "step 7", tensor=tensor, cut=cut)

    found = on_ranks(make_worlds(len(common)), compare)
    assert all(error is None or isinstance(error, ReplicasDiffer) for error in found), found
    return [error and str(error) for error in found]


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_the_rank_that_differs_is_named_on_every_rank(stranger: int) -> None:
    letters = "".join("x" if rank == stranger else "w" for rank in range(3))
    wanted = f"step 7: the weights of rank {stranger} differ from those of the other ranks"
    assert compared(letters, "www", 1, set()) == [wanted] * 3


@pytest.mark.parametrize(
    ("common", "shares", "message"),
    [
        ("wwwwww", "ababab", None),
        ("wwwwww", "ababxb", "rank 4 differ from those of the other ranks"),  # of the share's replicas
        ("wwwwvw", "axabab", "rank 1, 4 differ from those of the other ranks"),  # of what all ranks have alike
        ("wvwwwu", "ababab", "rank 1, 5 differ from those of the other ranks"),
        ("wwww", "axab", "rank 1, 3 differ from each other"),  # of two, either may be wrong
        ("wvwv", "abab", "rank 0, 1, 2, 3 differ from each other"),
        ("ww", "ab", None),  # one replica
    ],
)
def test_ranks_that_share_matrices_are_compared_with_those_of_the_same_share(
    common: str, shares: str, message: str | None
) -> None:
    wanted = message and f"step 7: the weights of {message}"
    assert compared(common, shares, 2, {"a"}) == [wanted] * len(common)


@pytest.mark.parametrize("large", [False, True])
def test_shards_of_different_sizes_may_fill_the_buffers_differently(large: bool, monkeypatch) -> None:
    """The odd ranks' shard is smaller, so that what all ranks have alike lies in other buffers there."""
    monkeypatch.setattr("hvd_transformer.parallel.replica_check._SMALL", 3 if large else 1 << 16)

    def uneven(rank: int) -> list[GradBuffer]:
        weights = {"b": numbers(5), "a": torch.full((40 - 30 * (rank % 2),), float(rank % 2)), "c": numbers(7)}
        weights |= {"d": numbers(3), "e": numbers(2)}
        return make_grad_buffers({name: nn.Parameter(each) for name, each in weights.items()}, {"c", "e"}, 100)

    def compare(world: World, changed: int | None) -> int:
        own = uneven(world.rank)
        if world.rank == changed:
            next(slot for buffer in own for slot in buffer.slots if slot.name == "d").parameter.data[1] += 1
        return check_replicas(own, world, "now", tensor=2, cut={"a"})

    assert [slot.name for slot in uneven(0)[0].slots] != [slot.name for slot in uneven(1)[0].slots]
    equal = on_ranks(make_worlds(6), lambda world: compare(world, None))
    assert all(isinstance(found, int) for found in equal), equal
    found = on_ranks(make_worlds(6), lambda world: compare(world, 3))
    assert {str(error) for error in found} == {"now: the weights of rank 3 differ from those of the other ranks"}


def test_equal_weights_cost_the_same_for_any_number_of_ranks() -> None:
    used = set()
    for size in (2, 8, 32):
        worlds = make_worlds(size)
        assert on_ranks(worlds, lambda world: check_replicas(buckets(), world, "now"))[0] is not None
        used |= {(world.link.horovod.messages, world.link.horovod.bytes) for world in worlds}
    assert len(used) == 1


def test_broadcast_gives_every_parameter_rank_zeros_value() -> None:
    own = buckets()
    broadcast_parameters(own, FakeWorld(rank=1))
    assert all((slot.parameter == 1).all() for bucket in own for slot in bucket.slots)
    mine = buckets()
    broadcast_parameters(mine, FakeWorld(rank=0))
    assert checksum([bucket.parameters for bucket in mine]) == checksum([bucket.parameters for bucket in buckets()])
