"""8 and 4 bits per value: representable sums are exact, what rounding loses is fed back; 8 bits are unbiased."""

import math

import pytest
import torch
from torch import Tensor
from wires import all_reduced, layouts, of_ranks

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.wire.blocks import BlockCodec
from hvd_transformer.gradients.wire.plain import Layout, WireOptions
from hvd_transformer.gradients.wire.quantized import Int4Wire, Int8Wire

BLOCK = 256
LEVELS = {Int8Wire: 127, Int4Wire: 7}  # the largest
BYTES = {Int8Wire: 256 + 4, Int4Wire: 2 * (64 + 4)}  # of so many values
LENGTHS = (1, BLOCK - 1, BLOCK, 5 * BLOCK + 7, 270_000)  # the last is more than a chunk
WIRES = pytest.mark.parametrize("kind", list(LEVELS))


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def error_of(wire: Int8Wire, name: str = "a") -> Tensor:
    return wire.tensors()[f"error.{name}"]


@WIRES
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_whole_multiples_of_a_blocks_scale_are_summed_exactly(size: int, length: int, kind: type[Int8Wire]) -> None:
    """Levels of each rank that are whole, and sums that are multiples of their own scale, `size`."""
    most = LEVELS[kind]
    every = torch.randint(-most, most + 1, (length,), generator=torch.Generator().manual_seed(length)).float()
    every[::BLOCK] = most  # of each rank; the largest of all ranks' sum is then size × most
    every = every.repeat(size, 1)

    def step(world: World) -> tuple[Tensor, Tensor]:
        wire = kind(world, layouts({"a": length}))
        found = all_reduced(wire, {"a": every[world.rank] / 1024}, 0)["a"]
        return found, error_of(wire)

    for found, error in of_ranks(size, step):
        assert torch.equal(found * 1024, every.sum(0))
        assert not error.any()


@WIRES
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_receive_the_same_within_a_level_of_the_sum(size: int, kind: type[Int8Wire]) -> None:
    length = LENGTHS[-1]
    every = drawn(size, length)

    def step(world: World) -> Tensor:
        return all_reduced(kind(world, layouts({"a": length})), {"a": every[world.rank].clone()}, 0)["a"]

    results = of_ranks(size, step)
    assert all(torch.equal(found, results[0]) for found in results)
    levels = (every.abs().max() + (every.sum(0).abs().max() / size if size > 2 else 0)) / LEVELS[kind]
    assert (results[0] - every.sum(0)).abs().max() <= 1.001 * size * levels


@WIRES
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_receives_its_part(size: int, kind: type[Int8Wire]) -> None:
    length = size * 1000  # parts that are no whole blocks
    every = drawn(size, length)

    def step(world: World) -> Tensor:
        wire = kind(world, layouts({"a": length}))
        wire.begin_step(0, 1, 1.0)
        sent = wire.reduce_scatter_async(every[world.rank].clone(), "a")
        assert sent.nbytes == size * 4 * BYTES[kind]  # 1,000 values are four blocks
        return sent.wait()

    found = torch.cat(of_ranks(size, step))
    assert (found - every.sum(0)).abs().max() <= 1.001 * size * every.abs().max() / LEVELS[kind]


def test_rounding_to_8_bits_is_unbiased() -> None:
    """The mean of many steps without feedback is the value: within 5 standard errors, at most half a level each."""
    length, steps = 2 * BLOCK, 2000
    own = drawn(length)

    def mean(world: World) -> Tensor:
        wire, total = Int8Wire(world, layouts({"a": length})), torch.zeros(length, dtype=torch.float64)
        for step in range(steps):
            error_of(wire).zero_()
            total += all_reduced(wire, {"a": own.clone()}, step)["a"]
        return total / steps

    found = of_ranks(2, mean)[0]
    level = float(own.abs().max()) / LEVELS[Int8Wire]
    off = (found - 2 * own).abs().max()
    assert off < 5 * level * math.sqrt(2) / 2 / math.sqrt(steps)
    # Rounding to the nearest level would be off by half a level on each rank, always.
    assert off < 0.2 * level


@WIRES
@pytest.mark.parametrize("size", [2, 3])
def test_over_the_steps_only_the_last_errors_are_missing(size: int, kind: type[Int8Wire]) -> None:
    length, steps = 3 * BLOCK + 5, 30
    every = drawn(steps, size, length)

    def run(world: World) -> tuple[Tensor, Tensor]:
        wire, total = kind(world, layouts({"a": length})), torch.zeros(length, dtype=torch.float64)
        for step in range(steps):
            total += all_reduced(wire, {"a": every[step, world.rank].clone()}, step)["a"]
        return total, error_of(wire).double()

    results = of_ranks(size, run)
    missing = every.double().sum((0, 1)) - results[0][0]
    errors = torch.stack([error for _, error in results])
    torch.testing.assert_close(missing, errors.sum(0), rtol=0, atol=1e-4)
    # One step's rounding: a level of the rank's own block, and on the part that it sums one of the sum's.
    assert errors.abs().max() < 2 * size * every.abs().max() / LEVELS[kind]
    assert missing.norm() < 2.5 / LEVELS[kind] * every.double().sum((0, 1)).norm()


def test_a_run_repeats_bit_for_bit_and_another_seed_step_or_rank_rounds_otherwise() -> None:
    own = drawn(3 * BLOCK)

    def found(seed: int, step: int) -> Tensor:
        def action(world: World) -> Tensor:
            wire = Int8Wire(world, layouts({"a": len(own)}), WireOptions(seed=seed))
            mine = own.clone() if world.rank == 0 else torch.zeros_like(own)
            return all_reduced(wire, {"a": mine}, step)["a"]

        return of_ranks(2, action)[0]

    assert torch.equal(found(1, 5), found(1, 5))
    assert not torch.equal(found(1, 5), found(1, 6))
    assert not torch.equal(found(1, 5), found(2, 5))


@WIRES
@pytest.mark.parametrize("width", [1, 48, 300])
def test_rows_of_all_ranks_arrive_in_rank_order_in_8_bits(width: int, kind: type[Int8Wire]) -> None:
    every = [drawn(3, width), drawn(0, width), drawn(5, width, seed=1)]

    def step(world: World) -> Tensor:
        wire = kind(world, {"rows.a": Layout(torch.empty(9, width))})
        wire.begin_step(0, 1, 1.0)
        sent = wire.all_gather_async(every[world.rank], "rows.a")
        assert sent.nbytes == len(every[world.rank]) * (width + 4)
        assert not wire.tensors()
        return sent.wait()

    results, exact = of_ranks(3, step), torch.cat(every)
    assert all(torch.equal(found, results[0]) for found in results)
    assert ((results[0] - exact).abs() <= 1.001 * exact.abs().amax(1, keepdim=True) / 127).all()


@WIRES
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_arrives_as_none_and_leaves_nothing_behind(
    size: int, wrong: float, kind: type[Int8Wire]
) -> None:
    def run(world: World) -> tuple[bool, Tensor]:
        wire, own = kind(world, layouts({"a": 2 * BLOCK})), torch.ones(2 * BLOCK)
        bad = own.clone()
        bad[7] = wrong if world.rank else 1.0
        found = all_reduced(wire, {"a": bad}, 0)["a"]
        wire.skip_step()
        return bool(found[7].isfinite()), all_reduced(wire, {"a": own}, 1)["a"]

    for finite, after in of_ranks(size, run):
        assert not finite
        torch.testing.assert_close(after, torch.full((2 * BLOCK,), float(size)))


@WIRES
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-44, 3e38])
def test_values_at_the_ends_of_float32(value: float, kind: type[Int8Wire]) -> None:
    def step(world: World) -> Tensor:
        wire = kind(world, layouts({"a": BLOCK}))
        return all_reduced(wire, {"a": torch.full((BLOCK,), value * (world.rank == 0))}, 0)["a"]

    torch.testing.assert_close(of_ranks(2, step)[0], torch.full((BLOCK,), value), rtol=1e-5, atol=1e-30)


@WIRES
def test_errors_follow_the_scale_of_the_loss(kind: type[Int8Wire]) -> None:
    """In other units: twice as large when loss scaling doubles."""

    def run(world: World) -> tuple[Tensor, Tensor]:
        wire = kind(world, layouts({"a": BLOCK}))
        all_reduced(wire, {"a": drawn(BLOCK, seed=world.rank)}, 0)
        before = error_of(wire).clone()
        wire.begin_step(1, 10, 2.0)
        return before, error_of(wire)

    for before, after in of_ranks(2, run):
        assert before.any() and torch.equal(after, 2 * before)


def test_rounding_to_4_bits_takes_the_nearest_level_of_both_halves_of_a_block() -> None:
    values, codec = drawn(2 * BLOCK), BlockCodec(4, BLOCK)
    message = torch.empty(codec.message_bytes(len(values)), dtype=torch.uint8)
    codec.encode(values, *codec.fields(message), None, None)
    scale = values.view(-1, BLOCK).abs().amax(1, keepdim=True) / 7
    wanted = (values.view(-1, BLOCK) / scale).round() * scale
    torch.testing.assert_close(codec.decode_sum([message], torch.empty_like(values)), wanted.flatten())
