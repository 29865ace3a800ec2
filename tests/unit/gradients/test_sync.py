"""Gradients add up as in plain autograd, and each bucket is sent once: as soon as it is full, never before."""

import copy
import threading
import time
from collections.abc import Callable

import pytest
import thread_world
import torch
from fake_world import FakeWorld
from torch import Tensor, nn

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.buffers import GradBuffer, ZeroShard, make_grad_buffers
from hvd_transformer.gradients.embedding_grads import EmbeddingGradPlan
from hvd_transformer.gradients.sharded_sync import make_grad_sync
from hvd_transformer.gradients.sync import GradSync
from hvd_transformer.gradients.weight_grads import WeightGradStore, install_stores
from hvd_transformer.nn.parallel_layers import Linear

EVERY_PARAMETER, ALL_IN_ONE = 1, 2**20


class Layers(nn.Module):
    """Three linear layers, of which `use` says which take part; they report when backward has reached them."""

    def __init__(self, events: list[str] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
        self.events = events

    def forward(self, inputs: Tensor, use: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        hidden = inputs
        for number in use:
            hidden = self.layers[number](hidden)
            if self.events is not None:
                hidden.register_hook(lambda grad, number=number: self.events.append(f"backward {number}"))
            hidden = hidden.tanh()
        return hidden.square().sum()


def made(world: World, bucket_bytes: int, **options: object) -> tuple[Layers, Layers, list[GradBuffer], GradSync]:
    """The model in buckets, a plain copy of it, the buckets and their sync."""
    torch.manual_seed(0)
    model = Layers(world.events if isinstance(world, FakeWorld) else None)
    plain = Layers()
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    buckets = make_grad_buffers(dict(model.named_parameters()), set(), bucket_bytes)
    return model, plain, buckets, make_grad_sync([buckets], world, **options)


def finish(sync: GradSync) -> None:
    sync.send_rest()
    sync.wait()


def inputs(number: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def reduced(buckets: list[GradBuffer]) -> dict[str, Tensor]:
    return {slot.name: slot.view(bucket.gradients).clone() for bucket in buckets for slot in bucket.slots}


def expect(buckets: list[GradBuffer], plain: Layers, factor: float = 1.0) -> None:
    own = reduced(buckets)
    for name, parameter in plain.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(own[name], factor * grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [EVERY_PARAMETER, 120, ALL_IN_ONE])
def test_gradients_of_several_backwards_add_up_as_in_autograd(bucket_bytes: int, rounds: int) -> None:
    model, plain, buckets, sync = made(World(), bucket_bytes)
    for step in range(2):  # the second step must not see the first
        plain.zero_grad()
        sync.begin_step()
        for number in range(rounds):
            if number == rounds - 1:
                sync.expect_last_backward(sync.buffers)
            model(inputs(10 * step + number)).backward()
            plain(inputs(10 * step + number)).backward()
        finish(sync)
        expect(buckets, plain)
        # A gradient exists once: in its bucket.
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("bucket_bytes", [EVERY_PARAMETER, ALL_IN_ONE])
def test_unused_parameters_get_zero_also_after_a_step_that_used_them(bucket_bytes: int) -> None:
    model, plain, buckets, sync = made(World(), bucket_bytes)
    for use in ((0, 1, 2), (0, 2), (1,)):
        plain.zero_grad()
        sync.begin_step()
        sync.expect_last_backward(sync.buffers)
        model(inputs(1), use).backward()
        plain(inputs(1), use).backward()
        finish(sync)
        expect(buckets, plain)
    assert not reduced(buckets)["layers.0.weight"].any()
    assert reduced(buckets)["layers.1.weight"].any()


def test_a_parameter_used_in_one_round_alone_keeps_that_rounds_gradient() -> None:
    model, plain, buckets, sync = made(World(), ALL_IN_ONE)
    sync.begin_step()
    for number, use in enumerate([(0, 1), (1, 2), (2,)]):
        if number == 2:
            sync.expect_last_backward(sync.buffers)
        model(inputs(number), use).backward()
        plain(inputs(number), use).backward()
    finish(sync)
    expect(buckets, plain)


def test_a_step_without_any_backward_is_all_zeros() -> None:
    """A rank whose replica has no sample in an epoch's last step."""
    model, plain, buckets, sync = made(FakeWorld(), EVERY_PARAMETER)
    for samples in (True, False):
        sync.begin_step()
        if samples:
            sync.expect_last_backward(sync.buffers)
            model(inputs(0)).backward()
        finish(sync)
    assert all(not gradient.any() for gradient in reduced(buckets).values())


def test_buckets_are_sent_while_backward_goes_on() -> None:
    world = FakeWorld()
    model, plain, buckets, sync = made(world, EVERY_PARAMETER)
    assert len(buckets) == 6
    sync.begin_step()
    sync.expect_last_backward(sync.buffers)
    model(inputs(0)).backward()
    plain(inputs(0)).backward()
    events = list(world.events)
    finish(sync)
    # Bucket 0 and 1 are the last layer's bias and weight, and so on down.
    assert events.index("send bucket.0") < events.index("backward 1")
    assert events.index("send bucket.1") < events.index("backward 0")
    assert events.index("backward 0") < events.index("send bucket.5")
    assert not any(event.startswith("wait") for event in events)
    expect(buckets, plain, factor=2.0)


def test_nothing_is_sent_before_the_last_round() -> None:
    world = FakeWorld()
    model, plain, buckets, sync = made(world, EVERY_PARAMETER)
    sync.begin_step()
    for number in range(2):
        model(inputs(number)).backward()
        plain(inputs(number)).backward()
    assert not any(event.startswith("send") for event in world.events)
    sync.expect_last_backward(sync.buffers)
    model(inputs(2)).backward()
    plain(inputs(2)).backward()
    finish(sync)
    # What was sent was complete.
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            grad = plain.get_parameter(slot.name).grad
            torch.testing.assert_close(slot.view(world.sent[f"bucket.{index}"]), grad, rtol=1e-13, atol=1e-15)
    expect(buckets, plain, factor=2.0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [EVERY_PARAMETER, 120, ALL_IN_ONE])
def test_each_bucket_is_sent_once_and_waited_for_once(bucket_bytes: int, overlap: bool) -> None:
    world = FakeWorld(size=3)
    model, plain, buckets, sync = made(world, bucket_bytes, overlap=overlap)
    for step, use in enumerate([(0, 1, 2), (0, 2)]):
        world.events.clear()
        plain.zero_grad()
        sync.begin_step()
        model(inputs(step), use).backward()
        plain(inputs(step), use).backward()
        sync.expect_last_backward(sync.buffers)
        model(inputs(step + 5), use).backward()
        plain(inputs(step + 5), use).backward()
        early = [event for event in world.events if event.startswith("send")]
        assert overlap or not early
        finish(sync)
        for kind in ("send", "wait"):
            seen = [event for event in world.events if event.startswith(kind)]
            assert sorted(seen) == sorted(f"{kind} bucket.{index}" for index in range(len(buckets)))
        expect(buckets, plain, factor=3.0)


def test_half_precision_on_the_wire_rounds_what_is_sent_from_the_second_step_on() -> None:
    world = FakeWorld()
    model, plain, buckets, sync = made(world, 120, compression="fp16")
    before = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    for step, dtype in enumerate([torch.float64, torch.float16, torch.float16]):
        plain.zero_grad()
        sync.begin_step()
        sync.wire.begin_step(step, 3, 1.0)
        sync.expect_last_backward(sync.buffers)
        model(inputs(step)).backward()
        plain(inputs(step)).backward()
        finish(sync)
        sent = [tensor for name, tensor in world.sent.items() if name.startswith("bucket.")]
        assert [tensor.dtype for tensor in sent] == [dtype] * len(buckets)
        for bucket in buckets:
            largest = max(plain.get_parameter(slot.name).grad.abs().max() for slot in bucket.slots)
            for slot in bucket.slots:
                own, grad = slot.view(bucket.gradients), plain.get_parameter(slot.name).grad
                assert own.dtype == torch.float64
                # 11 bits of each value, and what these lost of the last one, which the first step sent as it was; the
                # smallest ones are rounded to a tiny part of the bucket's largest.
                rounded = (grad.abs() if step else 0) + (before[slot.name].abs() if step > 1 else 0)
                assert ((own - 2 * grad).abs() <= 1.01 * 2**-10 * rounded + 1e-8 * largest).all()
                before[slot.name] = grad.clone()
        assert step == 0 or any(
            not torch.equal(reduced(buckets)[name], 2 * p.grad) for name, p in plain.named_parameters()
        )


def test_a_parameter_used_twice_is_complete_when_it_is_sent() -> None:
    world = FakeWorld()
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    (bucket,) = make_grad_buffers({"weight": weight}, set(), 1)
    sync = GradSync([[bucket]], world)
    sync.begin_step()
    sync.expect_last_backward(sync.buffers)
    ((weight * 5).tanh() * weight).sum().backward()  # as a tied embedding
    finish(sync)
    reference = weight.detach().clone().requires_grad_()
    ((reference * 5).tanh() * reference).sum().backward()
    torch.testing.assert_close(world.sent["bucket.0"][:2], reference.grad)
    assert [event for event in world.events if event.startswith("send")] == ["send bucket.0"]


class Lookup(nn.Module):
    """A matrix looked up and, if tied, used as an output layer; its lookups' gradient goes to `take`."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
        self.linear = nn.Linear(3, 3).double()
        self.tied = tied

    def forward(self, tokens: Tensor, take: Callable[[Tensor, Tensor], None] | None = None) -> Tensor:
        if take is None:
            vectors = self.matrix[tokens]
        else:
            vectors = self.matrix.detach()[tokens].requires_grad_()
            vectors.register_hook(lambda grad: take(tokens, grad))
        hidden = self.linear(vectors).tanh()
        return (hidden @ self.matrix.t() if self.tied else hidden).square().sum()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_all_ranks_and_rounds_are_added(tied: bool, gather: bool, size: int) -> None:
    torch.manual_seed(0)
    world = FakeWorld(size=size)
    model, plain = Lookup(tied), Lookup(tied)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    buckets = make_grad_buffers(
        dict(model.named_parameters()), set(), ALL_IN_ONE, alone={"matrix"} if gather else set()
    )
    assert len(buckets) == 1 + gather
    sync = make_grad_sync([buckets], world, embeddings={"matrix": EmbeddingGradPlan(gather, dense=tied)})
    take = sync.embedding_grads["matrix"].sink().put
    batches = torch.tensor([[1, 1, 4], [4, 0, 1]])
    for rounds in (2, 1, 0):  # the second step must not see the first; the third is one without samples
        world.events.clear()
        plain.zero_grad()
        sync.begin_step()
        for number in range(rounds):
            if number == rounds - 1:
                sync.expect_last_backward(sync.buffers)
            model(batches[number], take).backward()
            plain(batches[number]).backward()
        finish(sync)
        expect(buckets, plain, factor=size)
        # A matrix without a dense gradient is not sent, nor are rows that are in it.
        sent = sum(event.startswith("send bucket.") for event in world.events)
        assert sent == (1 + tied if gather else 1)
        assert world.events.count("send rows.matrix.rows") == gather


def test_an_unfinished_steps_rows_are_forgotten() -> None:
    world = FakeWorld(size=1)
    weight = nn.Parameter(torch.ones(4, 2))
    (bucket,) = make_grad_buffers({"weight": weight}, set(), 1)
    sync = GradSync([[bucket]], world, embeddings={"weight": EmbeddingGradPlan(gather=True)})
    sync.begin_step()
    sync.embedding_grads["weight"].sink().put(torch.tensor([1]), torch.ones(1, 2))
    sync.begin_step()
    finish(sync)
    assert not bucket.gradients.any()


class Products(Layers):
    """The same three layers, which give their products away."""

    def __init__(self, events: list[str] | None = None) -> None:
        super().__init__(events)
        self.layers = nn.ModuleList(Linear(3, 3) for _ in range(3)).double()

    def give(self, sync: GradSync, store: WeightGradStore) -> None:
        install_stores(self, [(self.layers, store)], sync)


def products(bucket_bytes: int) -> tuple[Products, Layers, list[GradBuffer], GradSync, FakeWorld, WeightGradStore]:
    torch.manual_seed(0)
    world, store = FakeWorld(), WeightGradStore()
    model, plain = Products(world.events), Layers()
    plain.load_state_dict(model.state_dict())
    buckets = make_grad_buffers(dict(model.named_parameters()), set(), bucket_bytes)
    sync = GradSync([buckets], world)
    model.give(sync, store)
    return model, plain, buckets, sync, world, store


@pytest.mark.parametrize("bucket_bytes", [EVERY_PARAMETER, ALL_IN_ONE])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_products_that_come_late_add_up_and_are_sent_once_complete(late: int, bucket_bytes: int) -> None:
    """Of three backwards, each adds its products when `late` more have run; the last ones when all have."""
    model, plain, buckets, sync, world, store = products(bucket_bytes)
    for step in range(2):
        world.events.clear()
        plain.zero_grad()
        sync.begin_step()
        for number in range(3):
            if number == 2:
                sync.expect_last_backward(sync.buffers)
            with store.deferring():
                model(inputs(10 * step + number)).backward()
            plain(inputs(10 * step + number)).backward()
            if number >= late:
                assert not any(event.startswith("send") for event in world.events)
                store.run_oldest()
        for _ in range(late):
            assert not any(event.startswith("send") for event in world.events)
            store.run_oldest()
        sent = [event for event in world.events if event.startswith("send")]
        assert sorted(sent) == sorted(f"send bucket.{index}" for index in range(len(buckets)))
        assert all(parameter.grad is None for parameter in model.parameters())
        finish(sync)
        assert [event for event in world.events if event.startswith("send")] == sent  # nothing was left to send
        expect(buckets, plain, factor=2)


def test_products_at_once_are_sent_while_backward_goes_on() -> None:
    model, plain, buckets, sync, world, _ = products(EVERY_PARAMETER)
    sync.begin_step()
    sync.expect_last_backward(sync.buffers)
    model(inputs(0)).backward()
    plain(inputs(0)).backward()
    first, last = (world.events.index(f"send bucket.{index}") for index in (0, len(buckets) - 1))
    assert first < world.events.index("backward 0") < last
    finish(sync)
    expect(buckets, plain, factor=2)


def test_a_parameter_may_get_products_in_one_round_and_autograds_gradients_in_another() -> None:
    model, plain, buckets, sync, _, store = products(ALL_IN_ONE)
    for numbers in ((0, 1, 2), (1, 0, 2)):
        plain.zero_grad()
        sync.begin_step()
        for number in numbers:
            if number == 2:
                sync.expect_last_backward(sync.buffers)
            for layer in model.layers:
                layer.weight_grads = None
            if number != 1:
                model.give(sync, store)
            model(inputs(number)).backward()
            plain(inputs(number)).backward()
        finish(sync)
        expect(buckets, plain, factor=2)


def test_products_in_another_number_format_are_added_in_the_buckets_own() -> None:
    model, _, buckets, sync, _, _ = products(ALL_IN_ONE)
    model.give(sync, WeightGradStore())
    sync.begin_step()
    values, grad = torch.randn(2, 4, 3, dtype=torch.bfloat16)
    for _ in range(2):
        model.layers[1].weight_grads.put(values, grad, None)
    own = reduced(buckets)
    assert torch.equal(own["layers.1.weight"], 2 * (grad.t() @ values).double())
    assert torch.equal(own["layers.1.bias"], 2 * grad.double().sum(0))


def shards(
    model: nn.Module, rank: int, size: int, gradients: bool, **options: object
) -> tuple[FakeWorld, list[GradBuffer], GradSync]:
    world = FakeWorld(rank=rank, size=size)
    buckets = make_grad_buffers(dict(model.named_parameters()), set(), 100, shard=ZeroShard(rank, size, gradients))
    return world, buckets, make_grad_sync([buckets], world, **options)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_each_rank_receives_the_sum_of_its_shard(rounds: int, gradients: bool, overlap: bool) -> None:
    size, found = 3, {}
    torch.manual_seed(0)
    first, plain = Layers(), Layers()
    plain.load_state_dict(first.state_dict())
    for rank in range(size):
        model = Layers()
        model.load_state_dict(first.state_dict())
        world, buckets, sync = shards(model, rank, size, gradients, overlap=overlap)
        plain.zero_grad()
        for _ in range(2):  # the second step must not see the first
            world.events.clear()
            sync.begin_step(rounds)
            for number in range(rounds):
                if number == rounds - 1:
                    sync.expect_last_backward(sync.buffers)
                model(inputs(number)).backward()
                assert not gradients or not any(parameter.grad is not None for parameter in model.parameters())
            finish(sync)
        for index, bucket in enumerate(buckets):
            found.setdefault(index, []).append(bucket.own_gradients.clone())
            assert world.events.count(f"send bucket.{index}") == (rounds if gradients and rounds else 1)
            # What lasts: the shard alone, or the whole.
            assert bucket.gradients.numel() * (size if gradients else 1) == bucket.parameters.numel()
    for number in range(rounds):
        plain(inputs(number)).backward()
    wholes = {index: torch.cat(parts) for index, parts in found.items()}
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            wanted = dict(plain.named_parameters())[slot.name].grad
            own = slot.view(wholes[index])
            assert torch.allclose(own, torch.zeros_like(own) if wanted is None else wanted * size, rtol=1e-12, atol=0)


@pytest.mark.parametrize("own", [0, 1, 3])
def test_a_rank_with_fewer_backwards_sends_as_often_as_the_others(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for each other's buffers, also where one has no sample left."""
    model = Layers()
    world, buckets, sync = shards(model, 0, 2, gradients=True)
    reduce = world.all_reduce_async_

    def with_another_rank(tensor: Tensor, name: str, operation: str = "sum") -> Callable[[], Tensor]:
        if (name, operation) == ("backwards", "max"):
            assert tensor.tolist() == [own]
            tensor.fill_(3)
        return reduce(tensor, name, operation)

    monkeypatch.setattr(world, "all_reduce_async_", with_another_rank)
    sync.begin_step(own)
    for number in range(own):
        model(inputs(number)).backward()
    finish(sync)
    for index in range(len(buckets)):
        assert world.events.count(f"send bucket.{index}") == 3


class Tied(nn.Module):
    """A tied matrix, whose dense gradient comes first in backward, and three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()

    def forward(self, tokens: Tensor, take: Callable[[Tensor, Tensor], None] | None = None) -> Tensor:
        hidden = self.matrix[tokens]
        if take is not None:
            hidden = self.matrix.detach()[tokens].requires_grad_()
            hidden.register_hook(lambda grad: take(tokens, grad))
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return (hidden @ self.matrix.t()).square().sum()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("counts", [(1, 0), (2, 1), (0, 2), (3, 0, 1)])
def test_ranks_with_other_numbers_of_backwards_do_not_wait_in_a_circle(
    counts: tuple[int, ...], is_first: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one message; in the first step no rank knows yet in which order the others send."""
    monkeypatch.setattr(thread_world, "WAIT_SECONDS", 5.0)
    torch.manual_seed(0)
    plain, size = Tied(), len(counts)
    steps = [counts] if is_first else [(1,) * size, counts]

    def batch(rank: int, step: int, number: int) -> Tensor:
        return torch.tensor([rank, 2 + step, 4 + number])

    def train(world: World) -> list[dict[str, Tensor]]:
        model = copy.deepcopy(plain)
        buffers = make_grad_buffers(
            dict(model.named_parameters()), set(), EVERY_PARAMETER, shard=ZeroShard(world.rank, size, True)
        )
        rows = {"matrix": EmbeddingGradPlan(gather=False, dense=True)}
        sync = make_grad_sync([buffers], world, embeddings=rows, bytes_in_flight=1, overlap=overlap)
        found, take = [], sync.embedding_grads["matrix"].sink().put
        for step, numbers in enumerate(steps):
            sync.begin_step(numbers[world.rank])
            for number in range(numbers[world.rank]):
                model(batch(world.rank, step, number), take).backward()
            finish(sync)
            found.append({buffer.slots[0].name: buffer.own_gradients.clone() for buffer in buffers})
        return found

    results = thread_world.on_ranks(worlds := thread_world.make_worlds(size), train)
    assert not [result for result in results if isinstance(result, BaseException)] and len(worlds) == size
    for step, numbers in enumerate(steps):
        plain.zero_grad()
        for rank, count in enumerate(numbers):
            for number in range(count):
                plain(batch(rank, step, number)).backward()
        for name, parameter in plain.named_parameters():
            whole = torch.cat([result[step][name] for result in results])
            torch.testing.assert_close(whole[: parameter.numel()], parameter.grad.flatten(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_a_bucket_with_an_unused_parameter_does_not_make_ranks_wait_in_a_circle(
    unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the pooler of a folder whose task needs none. It is sent when the backwards are over, on every rank."""
    monkeypatch.setattr(thread_world, "WAIT_SECONDS", 5.0)
    torch.manual_seed(0)
    plain, counts = nn.ModuleList([Layers(), Layers()]), (2, 1, 0)
    use = tuple(number for number in range(3) if number != unused)

    def backward(model: nn.ModuleList, rank: int, number: int) -> None:
        (model[0](inputs(5 * rank + number)) + model[1](inputs(5 * rank + number), use)).backward()

    def train(world: World) -> tuple[list[Tensor], list[GradBuffer]]:
        model = copy.deepcopy(plain)
        buffers = make_grad_buffers(
            dict(model.named_parameters()), set(), 200, shard=ZeroShard(world.rank, len(counts), True)
        )
        assert any(len(buffer.slots) > 2 for buffer in buffers) and len(buffers) > 2
        sync = make_grad_sync([buffers], world, bytes_in_flight=1)
        for numbers in ((1, 1, 1), counts):
            sync.begin_step(numbers[world.rank])
            for number in range(numbers[world.rank]):
                backward(model, world.rank, number)
            finish(sync)
        return [buffer.own_gradients.clone() for buffer in buffers], buffers

    results = thread_world.on_ranks(thread_world.make_worlds(len(counts)), train)
    assert not [result for result in results if isinstance(result, BaseException)]
    for rank, count in enumerate(counts):
        for number in range(count):
            backward(plain, rank, number)
    wholes = [torch.cat(parts) for parts in zip(*(result[0] for result in results), strict=True)]
    for whole, buffer in zip(wholes, results[0][1], strict=True):
        for slot in buffer.slots:
            wanted = plain.get_parameter(slot.name).grad
            wanted = torch.zeros_like(slot.parameter) if wanted is None else wanted
            torch.testing.assert_close(slot.view(whole), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("overlap", [True, False])
def test_stages_whose_backwards_end_in_another_order_on_each_rank_do_not_wait_in_a_circle(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their threads do not wait for each other. Two of three ranks then have no backward, and send in one order."""
    monkeypatch.setattr(thread_world, "WAIT_SECONDS", 5.0)
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)) for _ in range(2)).double()

    def train(world: World) -> list[Tensor]:
        stages = copy.deepcopy(plain)
        shard = ZeroShard(world.rank, 3, True)
        buffers = [
            make_grad_buffers(dict(stage.named_parameters(prefix=str(number))), set(), EVERY_PARAMETER, shard=shard)
            for number, stage in enumerate(stages)
        ]
        sync = make_grad_sync(buffers, world, bytes_in_flight=1, overlap=overlap)
        for numbers in ((1, 1, 1), (1, 0, 0)):
            sync.begin_step(numbers[world.rank])
            losses = [stage(inputs(world.rank)).square().sum() for stage in stages] if numbers[world.rank] else []
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads if world.rank == 1 else reversed(threads):
                thread.start()
                time.sleep(0.1)
            for thread in threads:
                thread.join()
            finish(sync)
        return [buffer.own_gradients.clone() for stage in buffers for buffer in stage]

    results = thread_world.on_ranks(thread_world.make_worlds(3), train)
    assert not [result for result in results if isinstance(result, BaseException)]
    for stage in plain:  # the last step
        stage(inputs(0)).square().sum().backward()
    parts = (torch.cat(parts) for parts in zip(*results, strict=True))
    wanted = {parameter.grad.flatten().double().sum().item() for parameter in plain.parameters()}
    assert {round(float(part.sum()), 9) for part in parts} == {round(total, 9) for total in wanted}


@pytest.mark.parametrize("room", [1, 10**9])
def test_so_many_bytes_are_on_their_way_at_once(room: int) -> None:
    model = Layers()
    world, buckets, sync = shards(model, 0, 2, gradients=True, bytes_in_flight=room)
    assert len(buckets) > 2
    sync.begin_step(1)
    model(inputs(0)).backward()
    sent, arrived = (sum(event.startswith(f"{what} bucket.") for event in world.events) for what in ("send", "wait"))
    assert sent == len(buckets) and sent - arrived == (1 if room == 1 else len(buckets))
    finish(sync)
    assert sum(event.startswith("wait bucket.") for event in world.events) == len(buckets)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_go_to_the_ranks_whose_shards_they_are_in(tied: bool, gather: bool, gradients: bool) -> None:
    size, rows = 2, {"matrix": EmbeddingGradPlan(gather, dense=tied)}
    torch.manual_seed(0)
    plain = Lookup(tied)
    batches = torch.tensor([[1, 1, 4], [4, 0, 1]])
    for batch in batches:
        plain(batch).backward()
    for rank in range(size):
        model = Lookup(tied)
        model.load_state_dict(plain.state_dict())
        world = FakeWorld(rank=rank, size=size)
        parameters, alone = dict(model.named_parameters()), {"matrix"} if gather else set()
        buckets = make_grad_buffers(parameters, set(), ALL_IN_ONE, alone, ZeroShard(rank, size, gradients))
        sync = make_grad_sync([buckets], world, embeddings=rows)
        sync.begin_step(len(batches))
        take = sync.embedding_grads["matrix"].sink().put
        for number, batch in enumerate(batches):
            if number == len(batches) - 1:
                sync.expect_last_backward(sync.buffers)
            model(batch, take).backward()
        finish(sync)
        for bucket in buckets:
            for slot in bucket.slots:
                own = bucket.own_part(slot.start, slot.stop)
                if own is None:
                    continue
                wanted = dict(plain.named_parameters())[slot.name].grad.flatten()
                start = bucket.own.start + own.start - slot.start
                wanted = wanted[start:][: own.stop - own.start] * size
                assert torch.allclose(bucket.own_gradients[own], wanted, rtol=1e-12, atol=0), slot.name


class Repeated(nn.Module):
    """The first of two linear layers is used before and after the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Linear(3, 3).double(), Linear(3, 3).double()

    def forward(self, values: Tensor) -> Tensor:
        hidden: Tensor = self.first(self.second(self.first(values).tanh()).tanh())
        return hidden.square().sum()


class RepeatedBehindNorm(Repeated):
    """The norm's gradient, from autograd, is the last one of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3).double()

    def forward(self, values: Tensor) -> Tensor:
        hidden: Tensor = self.first(self.first(self.norm(values)).tanh())
        return hidden.square().sum() + 0 * self.second(hidden).sum()


@pytest.mark.parametrize("shard", [ZeroShard(), ZeroShard(0, 2, gradients=True)])
def test_a_gradient_that_autograd_brings_too_late_is_an_error(shard: ZeroShard) -> None:
    """ZeRO stage 2 counts each parameter apart, so that here none is too late."""
    world, model, plain = FakeWorld(), RepeatedBehindNorm(), RepeatedBehindNorm()
    buckets = make_grad_buffers(dict(model.named_parameters()), set(), ALL_IN_ONE, shard=shard)
    sync = make_grad_sync([buckets], world)
    install_stores(model, [([model], WeightGradStore())], sync)
    sync.begin_step(1)
    sync.expect_last_backward(sync.buffers)
    if not shard.gradients:
        with pytest.raises(RuntimeError, match="called more than once in one `Layer` of the task"):
            model(inputs(0)).backward()
        return
    model(inputs(0)).backward()
    finish(sync)
    plain(inputs(0)).backward()
    (bucket,) = buckets
    for slot in bucket.slots:
        own, whole = bucket.own_part(slot.start, slot.stop), slot.parameter.new_zeros(bucket.parameters.numel())
        slot.view(whole).copy_(2 * plain.get_parameter(slot.name).grad)  # of two equal ranks
        torch.testing.assert_close(bucket.own_gradients[own or slice(0)], whole[bucket.own][own or slice(0)])


@pytest.mark.parametrize("shard", [ZeroShard(), ZeroShard(0, 2, gradients=True)])
@pytest.mark.parametrize("apart", [True, False])
def test_a_layer_that_is_used_again_is_sent_when_its_gradient_is_complete(apart: bool, shard: ZeroShard) -> None:
    """As layers of their own; within one layer nobody knows how often it will be used, and an error says so."""
    world, model, plain = FakeWorld(), Repeated(), Repeated()
    buckets = make_grad_buffers(dict(model.named_parameters()), set(), ALL_IN_ONE, shard=shard)
    sync = make_grad_sync([buckets], world)
    layers = [model.first, model.second, model.first] if apart else [model]
    install_stores(model, [(layers, WeightGradStore())], sync)
    sync.begin_step(2)
    if not apart:
        with pytest.raises(RuntimeError, match="called more than once in one `Layer` of the task"):
            for number in range(2):
                sync.expect_last_backward(sync.buffers)
                model(inputs(number)).backward()
        return
    for number in range(2):
        if number == 1:
            sync.expect_last_backward(sync.buffers)
        model(inputs(number)).backward()
        plain(inputs(number)).backward()
    assert "send bucket.0" in world.events  # before the end
    finish(sync)
    own = torch.cat([bucket.own_gradients for bucket in buckets])
    wanted = make_grad_buffers(dict(plain.named_parameters()), set(), ALL_IN_ONE, shard=ZeroShard(0, shard.count))
    for slot in wanted[0].slots:
        slot.view(wanted[0].gradients).copy_(2 * dict(plain.named_parameters())[slot.name].grad)
    torch.testing.assert_close(own, wanted[0].own_gradients, rtol=1e-13, atol=1e-15)
    if shard.count == 1:
        torch.testing.assert_close(2 * world.sent["bucket.0"], own, rtol=1e-13, atol=1e-15)
