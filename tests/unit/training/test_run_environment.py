"""Packages, hosts and devices of a run."""

import platform
import sys
from typing import Any

import pytest
import torch
from fake_world import FakeWorld

from hvd_transformer import __version__
from hvd_transformer.comm.horovod_env import usable_cores
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.training.run_environment import environment_lines, run_environment, slow_precision

CONFIG = load(overrides=["training.device=cpu"])


def test_this_process() -> None:
    world = World()
    found = run_environment(world, ParallelMesh.of(CONFIG, world))
    packages = found["packages"]
    assert (packages["python"], packages["torch"]) == (platform.python_version(), torch.__version__)
    assert packages["hvd-transformer"] == __version__
    assert ("transformers" in packages) == ("transformers" in sys.modules)
    (host,) = found["hosts"]
    assert (host["names"], host["ranks"], host["cores"], host["devices"]) == ([world.host], 1, usable_cores(), [])
    assert host["cpu"]


def test_hosts_that_are_alike_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(cores: int, *devices: str) -> dict[str, Any]:
        return {"cpu": "a CPU", "cores": cores, "devices": list(devices)}

    world = FakeWorld(size=5)
    world.hosts = ["h1", "h1", "h2", "h2", "h3"]
    ranks = [*(rank(16, "H100") for _ in range(4)), rank(8, "A100", "A100")]
    monkeypatch.setattr(world, "gather_objects", lambda _: ranks)
    found = run_environment(world, ParallelMesh.of(CONFIG, world))
    assert found["hosts"] == [
        {"names": ["h1", "h2"], "ranks": 2, "cpu": "a CPU", "cores": 16, "devices": ["H100", "H100"]},
        {"names": ["h3"], "ranks": 1, "cpu": "a CPU", "cores": 8, "devices": ["A100", "A100"]},
    ]
    assert environment_lines(found)[1:] == [
        "hosts h1, h2: 2 ranks, 16 cores, a CPU, 2 × H100",
        "host h3: 1 rank, 8 cores, a CPU, 2 × A100",
    ]
    monkeypatch.setattr(world, "gather_objects", lambda _: [])
    assert run_environment(world, ParallelMesh.of(CONFIG, world)) == {}


@pytest.mark.parametrize(
    ("precision", "hosts"),
    [("fp32", None), ("bf16", "h2"), ("fp16", "h1 and 2 more")],
)
def test_a_precision_that_is_slow_on_a_host_is_told(precision: str, hosts: str | None) -> None:
    config = load(overrides=["training.device=cpu", f"training.precision={precision}"])
    alike = [{"names": ["h1", "h3"], "number_formats": ["bf16"]}, {"names": ["h2"], "number_formats": []}]
    mesh = ParallelMesh.of(config, World())
    assert slow_precision(config, mesh, {}) is None
    found = slow_precision(config, mesh, {"hosts": alike})
    if hosts is None:
        assert found is None
    else:
        assert found is not None
        assert f"training.precision={precision} is slower than fp32 on {hosts}: no {precision} instructions" in found
