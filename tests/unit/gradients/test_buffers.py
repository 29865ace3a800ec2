"""Buckets hold every parameter once, in backward's order, and the model goes on training in them."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hvd_transformer.gradients.buffers import ZeroShard, make_grad_buffers, place_together
from hvd_transformer.planning.pass_memory import AllocationTracker

FORMATS = [torch.float32, torch.float64, torch.bfloat16]


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, nn.Parameter], set[str], int]:
    """Named parameters of any shapes and formats, which of them are not decayed, and a bucket size."""
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=12))
    parameters = {
        f"p{number}": nn.Parameter(torch.randn(shape).to(draw(st.sampled_from(FORMATS))))
        for number, shape in enumerate(shapes)
    }
    no_decay = {name for name in parameters if draw(st.booleans())}
    return parameters, no_decay, draw(st.sampled_from([1, 100, 1000, 2**20]))


@settings(deadline=None, max_examples=100)
@given(models())
def test_every_parameter_has_one_place_and_keeps_its_value(
    made: tuple[dict[str, nn.Parameter], set[str], int],
) -> None:
    parameters, no_decay, bucket_bytes = made
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    buckets = make_grad_buffers(parameters, no_decay, bucket_bytes)

    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.name for slot in slots) == sorted(parameters)
    assert all(slot.parameter is parameters[slot.name] for slot in slots)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name]) and parameter.shape == shapes[name]

    for bucket in buckets:
        assert bucket.parameters.shape == bucket.gradients.shape
        assert bucket.parameters.dtype == bucket.gradients.dtype
        assert not bucket.gradients.any()
        taken = torch.zeros(bucket.parameters.numel())
        for slot in bucket.slots:
            assert slot.parameter.dtype == bucket.parameters.dtype
            assert slot.start * slot.parameter.element_size() % 64 == 0
            assert (
                slot.parameter.data_ptr() == bucket.parameters.data_ptr() + slot.start * slot.parameter.element_size()
            )
            taken[slot.start : slot.stop] += 1
            assert slot.view(bucket.gradients).data_ptr() == bucket.gradients[slot.start :].data_ptr()
        # Nobody's place is another's, and what is no one's is zero.
        assert taken.max() == 1
        assert not bucket.parameters[taken == 0].any()


@settings(deadline=None, max_examples=60)
@given(models())
def test_decayed_parameters_come_first_and_the_halves_cut_between(
    made: tuple[dict[str, nn.Parameter], set[str], int],
) -> None:
    parameters, no_decay, bucket_bytes = made
    for bucket in make_grad_buffers(parameters, no_decay, bucket_bytes):
        halves = list(bucket.decay_groups())
        places = [index for place, _ in halves for index in range(place.start, place.stop)]
        assert places == list(range(bucket.parameters.numel()))
        assert len({decayed for _, decayed in halves}) == len(halves)
        for slot in bucket.slots:
            (decayed,) = [flag for place, flag in halves if place.start <= slot.start < place.stop]
            (end,) = [flag for place, flag in halves if place.start <= slot.stop - 1 < place.stop]
            assert decayed == end == (slot.name not in no_decay)


@settings(deadline=None, max_examples=60)
@given(models())
def test_buckets_follow_backward_and_hold_as_much_as_fits(
    made: tuple[dict[str, nn.Parameter], set[str], int],
) -> None:
    parameters, no_decay, bucket_bytes = made
    buckets = make_grad_buffers(parameters, no_decay, bucket_bytes)
    for dtype in FORMATS:
        kind = [bucket for bucket in buckets if bucket.parameters.dtype == dtype]
        own = [name for name, parameter in parameters.items() if parameter.dtype == dtype]
        sizes = {name: parameters[name].numel() * parameters[name].element_size() for name in own}
        order = list(reversed(own))  # the last layer's gradients are there first
        for place, bucket in enumerate(kind):
            names = {slot.name for slot in bucket.slots}
            assert names == set(order[: len(names)])
            order = order[len(names) :]
            size = sum(sizes[name] for name in names)
            assert size <= bucket_bytes or len(names) == 1
            assert place == len(kind) - 1 or size + sizes[order[0]] > bucket_bytes
        assert not order


@settings(deadline=None, max_examples=40)
@given(models())
def test_within_a_bucket_parameters_follow_backward(made: tuple[dict[str, nn.Parameter], set[str], int]) -> None:
    parameters, no_decay, bucket_bytes = made
    backward = list(reversed(parameters))
    for bucket in make_grad_buffers(parameters, no_decay, bucket_bytes):
        for group in (False, True):
            names = [slot.name for slot in bucket.slots if (slot.name in no_decay) == group]
            assert names == sorted(names, key=backward.index)


@pytest.mark.parametrize("bucket_bytes", [1, 600, 2**20])
def test_a_model_trains_through_the_views(bucket_bytes: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    plain = copy.deepcopy(model)
    buckets = make_grad_buffers(dict(model.named_parameters()), set(), bucket_bytes)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(5):
        inputs = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for one in (model, plain):
            one.zero_grad()
            one(inputs).square().sum().backward()
        optimizer.step()
        for bucket in buckets:
            for slot in bucket.slots:
                slot.view(bucket.gradients).copy_(slot.parameter.grad)
            bucket.parameters -= 0.1 * bucket.gradients
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


def test_the_picture_of_the_first_line() -> None:
    parameters = {f"{kind}{i}": nn.Parameter(torch.full([1], float(i))) for i in (5, 6, 7) for kind in ("w", "b")}
    (bucket,) = make_grad_buffers(parameters, {"b5", "b6", "b7"}, 2**20)
    assert [slot.name for slot in bucket.slots] == ["w7", "w6", "w5", "b7", "b6", "b5"]


def test_the_weights_exist_twice_only_while_there_are_no_gradients() -> None:
    """One buffer for all: the weights and their copy, then the copy and the gradients."""
    with AllocationTracker() as tracker:
        parameters = {str(number): nn.Parameter(torch.ones(64, 16)) for number in range(8)}
        weights = sum(parameter.nbytes for parameter in parameters.values())
        (buffer,) = make_grad_buffers(parameters, set(), 2**30)
        assert buffer.parameters.nbytes == weights
        assert tracker.take_peak() == tracker.now == 2 * weights


def test_what_is_set_apart_shares_no_buffer_with_others() -> None:
    parameters = {name: nn.Parameter(torch.ones(4)) for name in ("embedding", "block", "other embedding", "norm")}
    buffers = make_grad_buffers(parameters, set(), 2**20, apart=({"embedding", "other embedding"},))
    names = [[slot.name for slot in buffer.slots] for buffer in buffers]
    assert sorted(names) == [["norm", "block"], ["other embedding", "embedding"]]


def test_norms_are_those_of_the_shards_own_gradients() -> None:
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.ones(size)) for name, size in (("a", 30), ("b", 50), ("c", 7))}
    whole = torch.randn(128)  # the gaps between parameters count for nothing
    shares: dict[str, float] = {}
    for index in range(2):
        (buffer,) = make_grad_buffers(parameters, set(), 2**20, shard=ZeroShard(index, 2))
        buffer.gradients.copy_(whole)
        for name, norm in buffer.norms().items():
            shares[name] = shares.get(name, 0.0) + float(norm) ** 2
    for slot in buffer.slots:
        expected = float(whole[slot.start : slot.stop].double().square().sum())
        assert shares[slot.name] == pytest.approx(expected, rel=1e-5)
    buffer.begin_step()
    buffer.gradients.zero_()
    assert not any(buffer.norms().values())  # of the new step
    (padding,) = make_grad_buffers({"one": nn.Parameter(torch.ones(3))}, set(), 2**20, shard=ZeroShard(1, 2))
    assert padding.norms() == {}


def test_gradients_of_buffers_placed_together_lie_in_one_block_per_dtype():
    parameters = {f"w{n}": nn.Parameter(torch.ones(n, 3)) for n in (5, 2, 7)}
    parameters["double"] = nn.Parameter(torch.ones(3, dtype=torch.float64))
    buffers = make_grad_buffers(parameters, set(), 4, shard=ZeroShard(1, 2))
    blocks = []

    def zeros_like(tensor):
        blocks.append(torch.zeros_like(tensor))
        return blocks[-1]

    place_together(buffers, zeros_like)
    assert sorted(str(block.dtype) for block in blocks) == ["torch.float32", "torch.float64"]
    for number, buffer in enumerate(buffers, start=1):
        assert buffer.gradients.shape == buffer.parameters.shape
        for slot in buffer.slots:
            slot.parameter.grad = torch.full_like(slot.parameter, number)
            buffer.store_grad(slot)
        assert buffer.close() is buffer.gradients
    for number, buffer in enumerate(buffers, start=1):  # none has written into another's part
        (block,) = (block for block in blocks if block.dtype == buffer.gradients.dtype)
        assert buffer.gradients.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
        (slot,) = buffer.slots
        assert slot.view(buffer.gradients).unique().tolist() == [number]
        own = buffer.own_part(slot.start, slot.stop)
        norm = number * (own.stop - own.start) ** 0.5 if own else None
        assert {name: float(value) for name, value in buffer.norms().items()} == (
            {slot.name: pytest.approx(norm)} if own else {}
        )


def test_gradients_of_a_shard_alone_stay_where_they_are():
    buffers = make_grad_buffers({"w": nn.Parameter(torch.ones(4, 3))}, set(), 4, shard=ZeroShard(0, 2, gradients=True))
    place_together(buffers, None)
    assert buffers[0].gradients.shape == buffers[0].own_parameters.shape
