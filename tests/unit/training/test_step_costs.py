"""What steps cost: of three ranks with different work, by hand; FLOPs of a real step."""

from collections.abc import Sequence

import pytest
from fake_world import FakeWorld
from small_job import VOCABULARY, settings, trainer

from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.models.flops import language_model_flops
from hvd_transformer.monitoring.host_usage import HostMeter, HostUsage
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.training import step_costs
from hvd_transformer.training.state import NO_WISHES, StepResult, StepTotals
from hvd_transformer.training.step_costs import StepCosts, show_costs

TOTALS = StepTotals(1.0, 1, 1, NO_WISHES)


def step(seconds: float, waiting: float, data: float, flops: float) -> StepResult:
    return StepResult(1, 0, TOTALS, 1.0, 1.0, seconds, seconds - waiting, data=data, update=0.0, flops=flops)


def ranks(size: int, hosts: Sequence[str], peak: float | None, *words: str) -> list[StepCosts]:
    config, found = load(overrides=["training.device=cpu", *words]), []
    for rank in range(size):
        world = FakeWorld(rank, size)
        world.hosts = list(hosts)
        found.append(StepCosts(world, ParallelMesh.of(config, world), peak))
    return found


def summed(job: Sequence[StepCosts]) -> list[float]:
    return [sum(values) for values in zip(*(rank.take() for rank in job), strict=True)]


def test_costs_of_three_ranks_on_two_hosts(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    usages = iter([HostUsage(0.5, 100.0, 20.0), HostUsage(1.0, 300.0, 40.0)])
    memory = iter([5 * 2**30, 7 * 2**30, 2**30])
    monkeypatch.setattr(HostMeter, "read", lambda _: None)
    job = ranks(3, ["a", "a", "b"], 2e9, "parallel.pipeline=2")
    monkeypatch.setattr(HostMeter, "read", lambda _: next(usages))
    monkeypatch.setattr(step_costs, "peak_resident_bytes", lambda: next(memory))
    for _ in range(2):
        for number, rank in enumerate(job):
            rank.add(step(4.0, 0.5 * number, 0.25, 6e9))
    sums = summed(job)
    wanted = {
        "mfu": 2 * 3 * 6e9 / 8.0 / (3 * 2 * 2e9),  # FLOPs / seconds / peak of the six devices
        "peak_memory_bytes": 7 * 2**30,
        "data_wait_milliseconds": 250.0,
        "communication_wait_milliseconds": 500.0,
        "host_cpu_share": 0.75,
        "network_sent_bytes_per_second": 200.0,
        "network_received_bytes_per_second": 30.0,
    }
    assert all(rank.metrics(sums) == pytest.approx(wanted) for rank in job)
    assert show_costs(wanted).startswith(
        "MFU 37.5 %, peak memory 7.00 GiB on the worst rank, waiting for data 250.00 ms"
    )


def test_each_line_is_about_its_own_steps_and_the_first_has_none() -> None:
    (alone,) = ranks(1, ["a"], None)
    assert alone.metrics(alone.take()) == {} and show_costs({}) == ""
    for seconds in (1.0, 3.0):
        alone.add(step(seconds, 0.0, seconds / 10, 1e9))
        found = alone.metrics(alone.take())
        assert found["data_wait_milliseconds"] == pytest.approx(100 * seconds)
        assert "mfu" not in found and "communication_wait_milliseconds" not in found  # no peak, nobody to wait for


def test_a_tensor_group_counts_its_samples_once() -> None:
    config = load(overrides=["training.device=cpu", "parallel.tensor=2"])
    job = []
    for rank in range(2):
        world = FakeWorld(rank, 2)
        job.append(StepCosts(world, ParallelMesh.of(config, world), 1e9))
    for rank in job:
        rank.add(step(1.0, 0.0, 0.0, 1e9))
    assert job[0].metrics(summed(job))["mfu"] == pytest.approx(0.5)


def test_flops_of_a_step_are_those_of_all_its_batches() -> None:
    config = settings("training.accumulation=3", "parallel.micro_batches=2")
    job = trainer(config, World())
    found = job.step(next(job.steps()))
    assert found.flops == 3 * language_model_flops(config.model, VOCABULARY, (4, 5))
