"""Buckets and what is in flight, by device and number of ranks."""

from typing import Any

import pytest
from fake_world import FakeWorld
from torch import nn

from hvd_transformer.config import load
from hvd_transformer.gradients.param_all_gather import make_param_all_gathers
from hvd_transformer.gradients.sharded_sync import make_grad_sync
from hvd_transformer.gradients.sync import GradSync
from hvd_transformer.gradients.transfer_sizes import transfer_sizes
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.parallel import engine
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.constants import device_names
from hvd_transformer.planning.constants import load as load_constants

MIB, KIB = 2**20, 2**10
RANKS = (1, 2, 8, 64, 1024)


@pytest.mark.parametrize(
    ("device", "buckets"), [("cpu", (8, 8, 8, 16, 256)), ("cuda", (25, 25, 25, 25, 256))], ids=["cpu", "cuda"]
)
def test_buckets_grow_with_the_ranks(device: str, buckets: tuple[int, ...]) -> None:
    for ranks, expected in zip(RANKS, buckets, strict=True):
        found = transfer_sizes(device, ranks, None)
        assert found.bucket == expected * MIB
        assert found.bucket // ranks >= 256 * KIB  # a shard's


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("given", [None, 0.005, 8.0, 40.0])
def test_two_buckets_and_what_a_link_carries_meanwhile_are_in_flight(
    given: float | None, ranks: int, device: str
) -> None:
    found = transfer_sizes(device, ranks, given)
    assert found.bucket == int((given or found.bucket / MIB) * MIB)
    for most in (found.gradients, found.parameters):
        assert most >= 2 * found.bucket
        for name in device_names() if device == "cuda" else ():
            for link in load_constants(name).links["nccl"].values():
                assert most >= link.bandwidth * link.latency


@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
def test_on_a_few_cpus_they_are_as_measured(ranks: int) -> None:
    assert transfer_sizes("cpu", ranks, None) == (8 * MIB, 16 * MIB, 64 * MIB)


class Chain(nn.Sequential):
    """40 matrices of 64 KiB."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128, bias=False) for _ in range(40)))


def buckets_of(ranks: int, shard: str, hosts: list[str], *words: str) -> list[int]:
    """Bytes of the buckets of a `Chain`, in the engine's own choice."""
    world, model = FakeWorld(size=ranks), Chain()
    world.hosts = hosts
    config = load(overrides=["training.device=cpu", f"parallel.optimizer_shard={shard}", *words])
    mesh = ParallelMesh.of(config, world)
    layers = [Layer(str(number), module, module) for number, module in enumerate(model)]
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    made = engine.Engine(
        config, world, mesh, model, layers, partition=[len(layers)], splits={}, shapes=shapes, num_tokens=1
    )
    made.close()
    return [buffer.parameters.nbytes for buffer in made.buffers]


def test_the_engine_takes_the_size_that_is_given_or_chosen() -> None:
    assert buckets_of(2, "none", ["a", "a"]) == [40 * 64 * KIB]
    assert set(buckets_of(2, "none", ["a", "a"], "communication.bucket_mb=0.125")) == {128 * KIB}


def test_buckets_that_travel_early_are_no_smaller_than_a_shard_of_256_kib() -> None:
    """A quarter of the stage, 640 KiB, would be shards of 160 KiB on four ranks."""
    apart = ["a", "a", "b", "b"]
    assert buckets_of(4, "none", apart) == [640 * KIB] * 4
    assert buckets_of(4, "state", apart) == [1024 * KIB, 1024 * KIB, 512 * KIB]


@pytest.mark.parametrize("words", [["communication.bucket_mb=100"], []])
def test_zero_has_the_chosen_bytes_in_flight(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def sync(*args: Any, bytes_in_flight: float, **options: Any) -> GradSync:
        given.append(bytes_in_flight)
        return make_grad_sync(*args, bytes_in_flight=bytes_in_flight, **options)

    def gathers(layers: Any, stages: Any, group: Any, most: float) -> Any:
        given.append(most)
        return make_param_all_gathers(layers, stages, group, most)

    monkeypatch.setattr(engine, "make_grad_sync", sync)
    monkeypatch.setattr(engine, "make_param_all_gathers", gathers)
    buckets_of(2, "gradients", ["a", "a"], *words)
    assert sorted(given) == ([200 * MIB, 200 * MIB] if words else [16 * MIB, 64 * MIB])
