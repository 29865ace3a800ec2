"""PowerSGD: low rank is exact, errors are fed back, and torch's own hook finds the same."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from wires import all_reduced, layouts, of_ranks

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.buffers import GradBuffer, make_grad_buffers
from hvd_transformer.gradients.wire.plain import Layout, WireOptions
from hvd_transformer.gradients.wire.powersgd import PowerSgdWire, num_values

STEPS = 40  # of a run: the first 4 are sent as they are
RANK = WireOptions(powersgd_rank=2)


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def low_rank(rows: int, columns: int, rank: int, seed: int) -> Tensor:
    return drawn(rows, rank, seed=seed) @ drawn(rank, columns, seed=seed + 100)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_of_low_rank_arrives_exactly(size: int) -> None:
    """Rank 1 on both of the first ranks, of which the sum has rank 2."""
    every = [low_rank(20, 30, 1, seed=rank) if rank < 2 else torch.zeros(20, 30) for rank in range(size)]

    def step(world: World) -> tuple[Tensor, Tensor]:
        wire = PowerSgdWire(world, layouts({"a": (20, 30)}), RANK)
        found = all_reduced(wire, {"a": every[world.rank].clone()}, STEPS // 2, STEPS)["a"]
        return found, wire.tensors()["error.a"]

    results, exact = of_ranks(size, step), torch.stack(every).sum(0)
    for rank, (found, error) in enumerate(results):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
        assert torch.equal(found, results[0][0])
        torch.testing.assert_close(error.view(20, 30), every[rank] - exact / size, rtol=1e-4, atol=1e-4)


def test_over_the_steps_only_the_last_errors_are_missing() -> None:
    every = drawn(STEPS, 2, 12, 40) + low_rank(12, 40, 1, seed=7)

    def run(world: World) -> tuple[Tensor, Tensor, Tensor]:
        wire, total = PowerSgdWire(world, layouts({"a": (12, 40)}), RANK), torch.zeros(12, 40, dtype=torch.float64)
        for step in range(STEPS):
            total += all_reduced(wire, {"a": every[step, world.rank].clone()}, step, STEPS)["a"]
            if step == 3:
                torch.testing.assert_close(total, every[:4].double().sum((0, 1)), rtol=1e-5, atol=1e-5)
        return total, wire.tensors()["error.a"].double(), wire.tensors()["factor.a"]

    results = of_ranks(2, run)
    missing = every.double().sum((0, 1)) - results[0][0]
    torch.testing.assert_close(missing.flatten(), results[0][1] + results[1][1], rtol=0, atol=1e-3)
    assert torch.equal(results[0][2], results[1][2])


class _Bucket(SimpleNamespace):
    """As much of DDP's bucket as its PowerSGD hook uses, for one matrix."""

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return [self.flat.view(self.shape)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def test_torchs_own_hook_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same first factor, over some steps, on one rank: factor, gradient and error."""

    def reduced(tensor: Tensor, **_: Any) -> Any:
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result([tensor])
        return SimpleNamespace(get_future=lambda: done)

    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=SimpleNamespace(size=lambda: 1)), all_reduce=reduced, get_rank=lambda group=None: 0
    )
    monkeypatch.setattr(powerSGD_hook, "dist", fake)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    state.iter = 2
    wire = PowerSgdWire(World(), layouts({"a": (16, 24)}), RANK)
    shape, first = torch.Size((16, 24)), wire.tensors()["factor.a"].view(24, 2).clone()
    every = drawn(4, 16, 24) + 3 * low_rank(16, 24, 1, seed=9)
    monkeypatch.setattr(powerSGD_hook.torch, "randn", lambda *_, **__: first)
    for step, own in enumerate(every):
        bucket = _Bucket(flat=own.clone().view(-1), shape=shape)
        wanted = powerSGD_hook.powerSGD_hook(state, bucket).value().view(shape)
        found = all_reduced(wire, {"a": own.clone()}, STEPS // 2 + step, STEPS)["a"]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(wire.tensors()["error.a"], state.error_dict[0], rtol=1e-4, atol=1e-4)


def buffer(*shapes: tuple[int, ...]) -> GradBuffer:
    weights = {f"w{number}": nn.Parameter(torch.zeros(shape)) for number, shape in enumerate(shapes)}
    (found,) = make_grad_buffers(weights, set(), 2**20)
    return found


def test_what_is_no_large_matrix_travels_as_it_is_in_the_first_message() -> None:
    shapes = [(30, 40), (17,), (3, 4), (50, 20)]
    made, every = buffer(*shapes), drawn(2, 4096)

    def step(world: World) -> tuple[Tensor, int]:
        wire = PowerSgdWire(world, {"b": Layout(made.parameters, made.slots)}, RANK)
        own = every[world.rank, : made.parameters.numel()].clone()
        wire.begin_step(STEPS // 2, STEPS, 1.0)
        sent = wire.all_reduce_async(own, "b")
        wire.finish_sending()
        return sent.wait(), sent.nbytes

    (found, nbytes), other = of_ranks(2, step)
    assert torch.equal(found, other[0])
    exact = every.sum(0)[: len(found)]
    for slot in made.slots:
        mine, wanted = slot.view(found), slot.view(exact)
        assert torch.equal(mine, wanted) == (slot.name in ("w1", "w2"))
    assert [num_values(torch.Size(shape), 2) for shape in shapes] == [140, 17, 12, 140]
    padding = made.parameters.numel() - sum(math.prod(shape) for shape in shapes)
    assert nbytes == 4 * (140 + 17 + 12 + 140 + padding)


def test_a_matrix_without_gradient_gives_zeros_and_then_recovers() -> None:
    own = low_rank(20, 30, 1, seed=1)

    def run(world: World) -> list[Tensor]:
        wire = PowerSgdWire(world, layouts({"a": (20, 30)}), RANK)
        return [
            all_reduced(wire, {"a": gradient.clone()}, STEPS // 2, STEPS)["a"]
            for gradient in (torch.zeros_like(own), own, own)
        ]

    zeros, _, last = of_ranks(2, run)[0]
    assert not zeros.any()
    torch.testing.assert_close(last, 2 * own, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_what_is_no_number_arrives_as_none_and_leaves_nothing_behind(wrong: float) -> None:
    own = low_rank(20, 30, 1, seed=1)

    def run(world: World) -> tuple[bool, Tensor]:
        wire = PowerSgdWire(world, layouts({"a": (20, 30)}), RANK)
        bad = own.clone()
        bad[3, 4] = wrong if world.rank else 0.0
        found = all_reduced(wire, {"a": bad}, STEPS // 2, STEPS)["a"]
        wire.skip_step()
        return bool(found.isfinite().all()), all_reduced(wire, {"a": own.clone()}, STEPS // 2 + 1, STEPS)["a"]

    for finite, after in of_ranks(2, run):
        assert not finite
        torch.testing.assert_close(after, 2 * own, rtol=1e-3, atol=1e-3)
