"""Local steps follow DiLoCo, written out here with torch's own Nesterov optimizer for the outer weights."""

from typing import Any

import pytest
import torch
from fake_world import FakeWorld
from thread_world import make_worlds, on_ranks
from torch import Tensor, nn

from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import CommunicationConfig
from hvd_transformer.gradients.buffers import GradBuffer, make_grad_buffers
from hvd_transformer.gradients.local_steps import LocalSteps

SIZES = (5, 9, 3)  # of the buckets
FIRST, NUM_STEPS = 2, 59


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]


def update(replica: int, step: int, bucket: int) -> Tensor:
    """What a replica learns in a local step."""
    generator = torch.Generator().manual_seed(1000 * replica + 10 * step + bucket)
    return torch.randn(SIZES[bucket], generator=generator, dtype=torch.float64)


def buckets() -> list[GradBuffer]:
    """One per parameter: `make_grad_buffers` begins with the last."""
    parameters = {str(index): nn.Parameter(values) for index, values in enumerate(start())}
    made = make_grad_buffers(dict(reversed(parameters.items())), set(), 1)
    assert [buffer.slots[0].name for buffer in made] == ["0", "1", "2"]
    return made


def delay(period: int) -> int:
    """An eighth of the period, from 1 to 5."""
    return min(max(period // 8, 1), 5)


def config(local_steps: int, **more: float) -> CommunicationConfig:
    return CommunicationConfig(local_steps=local_steps, **more)


def diloco(num_replicas: int, period: int, averages: set[int], lr: float, momentum: float) -> list[list[Tensor]]:
    """Algorithm 2 of Streaming DiLoCo with alpha = 0.5, for all replicas in turn; their weights at the end."""
    replicas = [start() for _ in range(num_replicas)]
    outer = [weights.clone().requires_grad_() for weights in start()]
    optimizers = [torch.optim.SGD([weights], lr=lr, momentum=momentum, nesterov=momentum > 0) for weights in outer]
    sent: dict[int, tuple[int, Tensor]] = {}  # when and what, by bucket

    def move(bucket: int) -> None:
        outer[bucket].grad = sent.pop(bucket)[1]
        optimizers[bucket].step()
        for own in replicas:
            own[bucket] = 0.5 * own[bucket] + 0.5 * outer[bucket].detach()

    for step in range(FIRST, NUM_STEPS):
        taken = step - FIRST + 1
        for replica, own in enumerate(replicas):
            for bucket in range(len(SIZES)):
                own[bucket] = own[bucket] + update(replica, step, bucket)
        for bucket in range(len(SIZES)):
            turn = bucket * period // len(SIZES) or period  # 0: at the end of the first period
            if taken >= turn and (taken - turn) % period == 0:
                differences = [outer[bucket].detach() - own[bucket] for own in replicas]
                sent[bucket] = taken, torch.stack(differences).mean(0)
            elif bucket in sent and taken - sent[bucket][0] == delay(period):
                move(bucket)
        if step in averages:
            for bucket in range(len(SIZES)):
                if bucket in sent:
                    move(bucket)
                mean = torch.stack([own[bucket] for own in replicas]).mean(0)
                for own in replicas:
                    own[bucket] = mean
    return replicas


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(
    ("period", "lr", "momentum"),
    [(2, 0.7, 0.9), (7, 0.7, 0.9), (24, 0.7, 0.9), (12, 0.5, 0.0), (3, 1.0, 0.0), (45, 0.7, 0.9)],
)
@pytest.mark.parametrize("averages", [set(), {FIRST, 9, 10, 20}])
def test_the_replicas_follow_streaming_diloco(
    num_replicas: int, period: int, lr: float, momentum: float, averages: set[int]
) -> None:
    def train(world: World) -> list[Tensor]:
        own = buckets()
        local = LocalSteps(own, world, config(period, outer_lr=lr, outer_momentum=momentum), FIRST)
        assert [local.includes(step) for step in range(FIRST + 1)] == [False] * FIRST + [True]
        for step in range(FIRST, NUM_STEPS):
            assert local.includes(step)
            for bucket, buffer in enumerate(own):
                buffer.parameters[: SIZES[bucket]] += update(world.rank, step, bucket)
            local.exchange(step)
            if step in averages:
                local.average()
        return [buffer.parameters[:size].clone() for buffer, size in zip(own, SIZES, strict=True)]

    found: list[Any] = on_ranks(make_worlds(num_replicas), train)
    wanted = diloco(num_replicas, period, averages, lr, momentum)
    for rank, weights in enumerate(found):
        assert not isinstance(weights, BaseException), weights
        for own, reference in zip(weights, wanted[rank], strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-12, atol=1e-12)


def test_an_average_makes_replicas_equal_once_and_sends_nothing_where_they_are() -> None:
    def average(world: World) -> tuple[list[Tensor], Tensor, list[int]]:
        own, messages = buckets(), []
        local = LocalSteps(own, world, config(4), 0)
        state = [{"exp_avg": torch.full((2,), float(world.rank))}]
        local.average()
        assert not local.average_all(state)
        for step in range(6):
            assert local.includes(step)
            for buffer in own:
                buffer.parameters += world.rank
            local.exchange(step)
        for _ in range(2):
            before = world.link.horovod.messages
            local.average()
            messages.append(world.link.horovod.messages - before)
        assert local.average_all(state) and not local.average_all(state)
        return [buffer.parameters.clone() for buffer in own], state[0]["exp_avg"], messages

    (first, state, messages), *others = on_ranks(make_worlds(3), average)
    assert messages == [len(SIZES), 0] and state.tolist() == [1.0, 1.0]
    for weights, other_state, _ in others:
        assert all(map(torch.equal, weights, first)) and torch.equal(other_state, state)


def test_every_bucket_is_sent_once_in_each_period_and_waited_for_later() -> None:
    world = FakeWorld(size=2)
    local = LocalSteps(buckets(), world, config(18), 0)
    events: dict[int, list[str]] = {}
    for step in range(54):
        local.includes(step)
        world.events.clear()
        local.exchange(step)
        if world.events:
            events[step + 1] = list(world.events)
    turns = {taken: taken // 6 % 3 for taken in range(6, 55, 6)}
    sends = {taken: [f"send outer.{bucket}"] for taken, bucket in turns.items()}
    waits = {taken + 2: [f"wait outer.{bucket}"] for taken, bucket in turns.items() if taken + 2 <= 54}
    assert events == sends | waits


@pytest.mark.parametrize(("local_steps", "size"), [(1, 2), (8, 1)])
def test_no_step_is_local_with_a_period_of_one_or_a_single_replica(local_steps: int, size: int) -> None:
    local = LocalSteps(buckets(), FakeWorld(size=size), config(local_steps), 0)
    assert not any(map(local.includes, range(5))) and local.state == [{}] * len(SIZES)
