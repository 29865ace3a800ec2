"""What `bench train` measures, and makes of it: parts of a step, MFU, constants."""

import threading

import pytest
import torch
from test_synthetic_task import SMALL, B, T, V
from thread_world import make_worlds, on_ranks

from hvd_transformer.bench.train import Alone, StepTimes, TrainResult, _memory_explained, _times, bench_train
from hvd_transformer.bench.training_constants import training_constants
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.data.sampler import StepPlan
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.constants import Constants, step_side
from hvd_transformer.training.out_of_memory import OutOfMemory
from hvd_transformer.training.state import NO_WISHES, StepResult, StepTotals
from hvd_transformer.training.trainer import Trainer

CONFIG = load(overrides=SMALL)
TOTALS = StepTotals(1.0, 1, 1, NO_WISHES)


def device(**more: object) -> Constants:
    given = {"device": "d", "matmul": {"fp32": {8: 1e9, 64: 4e9}}, "memory_bandwidth": 1e10, "memory_bytes": 1}
    return Constants.model_validate({**given, **more})


def result(world: World, alone: Alone | None, flops: float = 0.0) -> TrainResult:
    """Of a step of half a second."""
    mesh = ParallelMesh.of(CONFIG, World())
    return TrainResult(1000, world, mesh, 4, "tokens", B * T, 3, 0.5, StepTimes(1, 1, 0, 0, 0), alone, flops)


def test_parts_of_a_step_add_up_and_a_gpu_ends_its_step_with_the_update() -> None:
    step = StepResult(1, 0, TOTALS, 1.0, 1.0, seconds=10, work=7, data=1, update=2)
    assert _times(10, step, num_ranks=2) == StepTimes(10, compute=4, wait=3, update=2, data=1)
    assert _times(11, step, num_ranks=2) == StepTimes(11, compute=4, wait=3, update=3, data=1)
    alone = _times(10, step, num_ranks=1)
    assert alone == StepTimes(10, compute=7, wait=0, update=2, data=1)  # there is nobody to wait for
    assert (alone.work, _times(10, step, 2).work) == (10, 7)


def test_utilization_is_flops_per_second_over_those_of_the_devices() -> None:
    found = result(World(), None, flops=1e9)
    assert found.utilization(8e9) == 0.25
    assert found.targets_per_second == B * T / 0.5


def test_constants_of_training() -> None:
    """Rate of a step's product: tokens × width × width, between the measured sides."""
    world = World()
    alone = Alone([StepTimes(3.0, 2.0, 0, 0.5, 0.5)] * 3, together=3.75, jitter=0.02)
    known = device(training_fraction={"bf16": 0.1})
    flops = 1e9
    rate = known.matmul_rate("fp32", step_side(B * T, 16))
    assert 1e9 < rate < 4e9
    found = training_constants(CONFIG, known, result(world, alone, flops))
    assert found.training_fraction == {"bf16": 0.1, "fp32": pytest.approx(flops / 2.0 / rate)}
    assert (found.optimizer_seconds, found.jitter) == (0.5 / 1000, 0.02)
    assert found.crowding == 3.75 / 3.0
    fuller = device(devices_per_host=4)
    assert training_constants(CONFIG, fuller, result(world, alone, flops)).crowding == 1.0  # others were idle
    assert training_constants(CONFIG, known, result(world, alone, 1e15)).training_fraction["fp32"] == 1.0
    assert training_constants(CONFIG, known, result(make_worlds(2)[0], None)) is known


def test_a_layers_own_seconds_are_what_smaller_micro_batches_take_longer() -> None:
    """The same step, made from given constants: in one micro-batch, and in one per sample."""
    known, flops, fraction, seconds = device(), 1e9, 0.25, 0.003

    def step(count: int) -> list[StepTimes]:
        rate = known.matmul_rate("fp32", step_side(B // count * T, 16))
        return [StepTimes(9.0, flops / (fraction * rate) + count * 4 * seconds, 0, 0.5, 0.5)] * 3

    def found(pieces: list[StepTimes] | None) -> Constants:
        alone = Alone(step(1), together=9.0, jitter=0.0, pieces=pieces)
        return training_constants(CONFIG, known, result(World(), alone, flops))

    both = found(step(B))
    assert both.layer_seconds == pytest.approx(seconds)
    assert both.training_fraction["fp32"] == pytest.approx(fraction)
    alone = found(None)
    assert alone.layer_seconds == 0.0 and alone.training_fraction["fp32"] < fraction
    faster = [StepTimes(9.0, 0.9 * step(1)[0].compute, 0, 0.5, 0.5)]  # noise
    assert found(faster) == alone
    slower = [StepTimes(9.0, 1e6, 0, 0.5, 0.5)]  # as if a step of one micro-batch took no time but for its layers
    most = found(slower)
    assert most.training_fraction["fp32"] == pytest.approx(1.0)
    assert 4 * most.layer_seconds == pytest.approx(
        step(1)[0].compute - flops / known.matmul_rate("fp32", step_side(B * T, 16))
    )


def test_real_steps(one_thread: None) -> None:
    found = bench_train(CONFIG, V, 0.01, World(), Heartbeat())
    assert (found.targets_per_step, found.unit) == (B * T, "tokens") and found.num_steps >= 3
    parts = found.parts
    assert parts.wait == 0 and min(parts.compute, parts.update, parts.data) > 0
    assert parts.compute + parts.update + parts.data < 3 * found.step
    assert found.alone is not None and found.alone.first is not None and len(found.alone.first) == found.num_steps
    assert found.num_layers == 4 and found.alone.pieces is not None  # embedding, two blocks, head
    # Kaplan et al. 2020, table 1, with the tied output layer: 2 FLOPs per weight and token, backward twice as many,
    # and attention 2 × 2 × T × D per layer and token.
    weights = 2 * (4 * 16 * 16 + 2 * 16 * 32) + V * 16
    wanted = 3 * B * T * (2 * weights + 2 * 2 * 2 * T * 16)
    assert found.flops == pytest.approx(wanted, rel=0.05)


def test_random_tokens_do_not_diverge_whatever_the_rate(one_thread: None) -> None:
    assert bench_train(load(overrides=[*SMALL, "optimizer.lr=1e9"]), V, 0.01, World(), Heartbeat()).step > 0


def test_one_rank_and_all_ranks_take_turns_alone(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int, int]] = []  # thread, ranks of its world, micro-batches
    step = Trainer.step

    def spy(trainer: Trainer, plan: StepPlan) -> StepResult:
        taken.append((threading.current_thread().name, trainer.world.size, trainer.config.parallel.micro_batches))
        return step(trainer, plan)

    monkeypatch.setattr(Trainer, "step", spy)
    worlds = make_worlds(2)
    worlds[1].local_rank = 1
    first, second = on_ranks(worlds, lambda world: bench_train(CONFIG, V, 0.01, world, Heartbeat()))
    alone = [(thread, count) for thread, size, count in taken if size == 1]
    one, *_ = alone[0]
    (other,) = {thread for thread, _ in alone} - {one}
    for turn in zip(*[iter(alone)] * 4, strict=True):
        assert turn[:2] == ((one, 1), (one, B))  # while the other rank waits
        assert sorted(turn[2:]) == sorted([(one, 1), (other, 1)])
    assert first.alone is not None and second.alone is not None
    assert first.alone.first is not None and second.alone.first is None
    assert first.alone.jitter == second.alone.jitter and first.alone.together == second.alone.together


def test_a_lack_of_memory_is_told_in_a_line() -> None:
    """Ranks that train alone have the optimizer that ZeRO would share."""
    world = World()
    told = r"out of memory: alone; `hvd-transformer plan` says what takes it$"
    with pytest.raises(OutOfMemory, match=told) as raised, _memory_explained(world, "alone"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert raised.value.code == 2
    with pytest.raises(ValueError, match="other"), _memory_explained(world):
        raise ValueError("other")
