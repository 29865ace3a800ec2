"""Formats on the wire against float64 sums of 512 replicas; scales keep small gradients and do not overflow."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_world import FakeWorld
from small_job import settings, trainer, weights
from thread_world import make_worlds, on_ranks
from torch import Tensor
from wires import layouts

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.wire.choice import make_wire
from hvd_transformer.gradients.wire.fp16 import HEADROOM, Fp16Fp32SumWire, Fp16Wire
from hvd_transformer.gradients.wire.plain import Layout, Wire

REPLICAS = 512
LENGTH = 16 * REPLICAS


def gradients(seed: int, common: float = 1.0) -> Tensor:
    """Of each replica [REPLICAS, LENGTH], divided by all replicas' targets: what they have in `common`, and noise."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(LENGTH, generator=generator) / 2) * 1e-4 / REPLICAS
    mean = common * torch.randn(LENGTH, generator=generator)
    return sizes * (mean + torch.randn(REPLICAS, LENGTH, generator=generator))


def ring_sum(messages: Tensor) -> Tensor:
    """The sum [LENGTH] of all ranks' messages as a ring reduce-scatter adds it: each part goes once around, every rank
    adds its own and rounds to the message's format."""
    parts = messages.view(REPLICAS, REPLICAS, -1)  # rank, part
    place = torch.arange(REPLICAS)
    total = parts[(place + 1) % REPLICAS, place]
    for hop in range(2, REPLICAS + 1):
        total = total + parts[(place + hop) % REPLICAS, place]
    return total.flatten()


def rows(length: int) -> dict[str, Layout]:
    """A buffer that keeps no errors."""
    return {"bucket.0": Layout(torch.empty(length))}


class Replicas:
    """A group of which one rank is at hand; `largest` and `received` are what the others would send it."""

    size = REPLICAS

    def all_reduce_async_(self, tensor: Tensor, name: str, operation: str) -> Callable[[], Tensor]:
        assert (name, operation) == ("wire.peaks", "max")
        return lambda: tensor.copy_(self.largest)

    def all_to_all_async(self, tensor: Tensor, name: str) -> Callable[[], tuple[Tensor, Sequence[int]]]:
        return lambda: (self.received, [])


def end_step(wire: Wire, every: Tensor) -> None:
    wire.group.largest = every.abs().max().double()[None]
    wire.finish_sending()
    wire.end_step()
    wire.begin_step(1, 2, 1.0)  # the next one


def after_a_step(kind: type[Wire], every: Tensor) -> Wire:
    """A wire whose step before had these gradients."""
    group: Any = Replicas()
    wire = kind(group, rows(LENGTH))
    own = every[0]
    assert wire.encode(own, "bucket.0") is own  # there is no scale yet
    end_step(wire, every)
    return wire


def error(found: Tensor, every: Tensor) -> float:
    exact = every.double().sum(0)
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("common", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("grown", [0.1, 1.0, HEADROOM / 2])
def test_the_sum_of_512_replicas_in_float16_is_near_the_exact_one(common: float, grown: float) -> None:
    """Also where gradients have grown or fallen since the step from which their scale is."""
    wire, every = after_a_step(Fp16Wire, gradients(0, common) / grown), gradients(1, common)
    sent = torch.stack([wire.encode(own, "bucket.0") for own in every])
    assert sent.dtype == torch.float16
    assert error(wire.decode(ring_sum(sent), "bucket.0"), every) <= 5e-3


@pytest.mark.parametrize("common", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("grown", [0.1, 1.0, HEADROOM / 2])
def test_summed_in_float32_it_is_nearer(common: float, grown: float) -> None:
    wire, every = after_a_step(Fp16Fp32SumWire, gradients(0, common) / grown), gradients(1, common)
    sent = torch.stack([wire.encode(own, "bucket.0") for own in every]).view(REPLICAS, REPLICAS, -1)
    sums = []
    for rank in range(REPLICAS):
        wire.group.received = sent[:, rank].flatten()
        sums.append(wire.sum_part_async(sent[rank].flatten(), "bucket.0")())
    assert error(wire.decode(torch.cat(sums), "bucket.0"), every) <= 1e-3
    assert error(wire.decode(torch.cat(sums).half(), "bucket.0"), every) <= 1e-3  # gathered from all ranks


def test_without_a_scale_512_replicas_lose_a_part_of_it() -> None:
    """The reason for the scale, and a check of the tests above: they are as hard as that."""
    every = gradients(1, common=0.0)
    sent = every.half()
    assert float(((sent == 0) & (every != 0)).float().mean()) > 0.1
    assert error(ring_sum(sent).float(), every) > 0.05


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kind", [Fp16Wire, Fp16Fp32SumWire])
@pytest.mark.parametrize("shards", [False, True])
def test_all_ranks_get_the_same_sum_of_all_or_their_part_of_it(kind: type[Wire], size: int, shards: bool) -> None:
    length = 60 if shards else 61  # does not divide evenly
    every = torch.randn(3, size, length, generator=torch.Generator().manual_seed(0)) * 1e-7

    def steps(world: World) -> list[Tensor]:
        wire, found = kind(world, layouts({"a": length, "b": 1})), []
        for step, own in enumerate(every[:, world.rank]):
            wire.begin_step(step, 3, 1.0)
            sent = (wire.reduce_scatter_async if shards else wire.all_reduce_async)(own.clone(), "a")
            assert sent.nbytes == length * (2 if step else 4)
            wire.finish_sending()
            found.append(sent.wait().clone())
            wire.end_step()
            assert not wire.overflowed
        return found

    results: list[Any] = on_ranks(make_worlds(size), steps)
    assert all(isinstance(found, list) for found in results), results
    for step in range(3):
        sums = torch.cat([found[step] for found in results]) if shards else results[0][step]
        assert shards or all(torch.equal(found[step], sums) for found in results)
        exact = every[step].double().sum(0)
        assert float((sums - exact).norm() / exact.norm()) < (1e-3 if step else 1e-6)


def test_equal_gradients_that_grow_up_to_the_headroom_do_not_overflow_and_beyond_it_the_step_says_so() -> None:
    """The worst case: all replicas have the same sign and size."""
    ones = torch.ones(REPLICAS, LENGTH)
    wire = after_a_step(Fp16Wire, ones * 0.999)
    fits, too_large = 0.999 * HEADROOM * ones, 4 * HEADROOM * ones
    found = ring_sum(torch.stack([wire.encode(own, "bucket.0") for own in fits]))
    assert found.isfinite().all()
    end_step(wire, fits)
    assert not wire.overflowed
    wire = after_a_step(Fp16Wire, ones * 0.999)
    found = ring_sum(torch.stack([wire.encode(own, "bucket.0") for own in too_large]))
    assert not found.isfinite().all()
    end_step(wire, too_large)
    assert wire.overflowed
    found = ring_sum(torch.stack([wire.encode(own, "bucket.0") for own in too_large]))
    assert error(wire.decode(found, "bucket.0"), too_large) < 0.2  # of equal values: rounded the same way 512 times
    end_step(wire, too_large)
    assert not wire.overflowed


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_is_no_overflow_of_the_format(wrong: float) -> None:
    def step(world: World) -> tuple[bool, bool]:
        wire = Fp16Wire(world, layouts({"a": 8}))
        for step, own in enumerate((torch.ones(8), torch.full((8,), wrong if world.rank else 1.0))):
            wire.begin_step(step, 2, 1.0)
            sent = wire.all_reduce_async(own, "a")
            wire.finish_sending()
            before = wire.state()
            sent.wait()
            wire.end_step()
        return wire.overflowed, wire.state() == before

    assert on_ranks(make_worlds(2), step) == [(False, True)] * 2


def test_a_scale_falls_slowly_after_small_gradients() -> None:
    every = gradients(0)
    wire = after_a_step(Fp16Wire, every)
    before = wire.state()["exponents"]["bucket.0/8192"]
    for step in range(1, 4):
        wire.encode(every[0], "bucket.0")
        end_step(wire, every / 1e6)
        assert wire.state()["exponents"] == {"bucket.0/8192": before - step}


@pytest.mark.parametrize("largest", [1e-37, 3e38])
def test_scales_stay_within_float32(largest: float) -> None:
    every = torch.full((2, LENGTH), largest)
    wire = after_a_step(Fp16Wire, every)
    assert wire.decode(wire.encode(every[0], "bucket.0"), "bucket.0").isfinite().all()


@pytest.mark.parametrize("saved", [lambda state: state, lambda state: state["exponents"]], ids=["now", "before"])
def test_a_state_goes_on_where_it_was_and_that_of_other_buckets_is_ignored(saved: Callable[[Any], Any]) -> None:
    """Also in a checkpoint of the time before formats kept errors."""
    every = gradients(0)
    wire, again = after_a_step(Fp16Wire, every), Fp16Wire(Replicas(), rows(LENGTH))
    again.load(saved(wire.state()))
    assert torch.equal(again.encode(every[1], "bucket.0"), wire.encode(every[1], "bucket.0"))
    other = Fp16Wire(Replicas(), rows(LENGTH + 1))
    other.load(wire.state())
    assert other.state()["exponents"] == {} and other.encode(every[0], "bucket.0").dtype == torch.float32


def test_alone_or_without_compression_nothing_is_changed() -> None:
    tensor = torch.ones(3)
    for wire, ranks in ((make_wire("none", FakeWorld(), rows(3)), 2), (make_wire("fp16", World(), rows(3)), 1)):
        found = wire.all_reduce_async(tensor.clone(), "bucket.0").wait()
        assert torch.equal(found, ranks * tensor)
        wire.finish_sending()
        wire.end_step()
        assert wire.state() == {} and wire.tensors() == {} and not wire.overflowed


def words(*more: str) -> Any:
    return settings("communication.compression=fp16", "optimizer.schedule=constant", *more)


def test_an_overflow_in_transit_skips_the_step_and_the_next_one_fits(caplog: pytest.LogCaptureFixture) -> None:
    job = trainer(words(), FakeWorld())
    plans = job.steps()
    job.step(next(plans))
    before, wire = weights(job), job.engine.grad_sync.wire
    wire.load({key: exponent - 20 for key, exponent in wire.state()["exponents"].items()})
    result = job.step(next(plans))
    assert not math.isfinite(result.grad_norm)
    assert "step 2 is skipped" in caplog.text
    assert (job.state.step, job.state.updates) == (2, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(job).items())
    assert math.isfinite(job.step(next(plans)).grad_norm)
    assert (job.state.step, job.state.updates) == (3, 2)


def test_a_checkpoint_has_the_scales() -> None:
    """Two equal jobs; one forgets its scales and loads them from the other's checkpoint."""
    jobs = [trainer(words(), FakeWorld()) for _ in range(2)]
    sent = []
    for job in jobs:
        plans = job.steps()
        for _ in range(3):
            job.step(next(plans))
        saved = jobs[0].capture("digest", 0, False).state["wire"]
        assert saved[0]["exponents"]
        job.engine.load_wire_states([])
        job.engine.load_wire_states(saved)
        job.step(next(plans))
        sent.append({name: tensor for name, tensor in job.world.sent.items() if name.startswith("bucket.")})
    assert all(tensor.dtype == torch.float16 for tensor in sent[1].values())
    assert all(torch.equal(tensor, sent[0][name]) for name, tensor in sent[1].items())
