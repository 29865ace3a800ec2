"""Which library sums the activations of a tensor group, and in which format."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fake_world import FakeWorld
from thread_world import make_worlds, on_ranks
from torch import Tensor

from hvd_transformer.comm import torch_group
from hvd_transformer.comm.torch_group import StreamWaits
from hvd_transformer.comm.world import AgreedError, World
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.parallel import tensor_backend
from hvd_transformer.parallel.tensor_backend import connect_stages
from hvd_transformer.parallel.tensor_parallel import RankTensorGroup

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def library(wanted: str, world: World, device: torch.device, shard: str = "none", dp: int = 2) -> tuple[str, int]:
    """The library for two stages, and its number of communicators. No GPU and no connection is needed."""
    words = [f"communication.tensor_backend={wanted}", f"parallel.optimizer_shard={shard}"]
    config = load(overrides=["parallel.tensor=2", *words])
    mesh: Any = SimpleNamespace(dp=dp, device=device, devices=(device,) * 2, tp_group=world.group(world.ranks))
    asked: list[str] = []

    def connect(world: World, group: Any, backend: str, devices: Any) -> Any:
        asked.append(backend)
        return SimpleNamespace(communicators=[object() for _ in devices], close=lambda: None)

    with patch.object(torch_group, "TorchWorld", connect):
        stages = connect_stages(config, world, mesh).stages
    return f"torch {asked[0]}" if asked else "horovod", len(set(map(id, stages)))


@pytest.mark.parametrize(
    ("wanted", "device", "nccl", "found"),
    [
        ("auto", CPU, True, ("horovod", 1)),
        ("auto", GPU, True, ("torch nccl", 2)),
        ("auto", GPU, False, ("horovod", 1)),
        ("horovod", GPU, True, ("horovod", 1)),
        ("torch", CPU, False, ("torch gloo", 2)),
        ("torch", GPU, True, ("torch nccl", 2)),
    ],
)
def test_the_library_follows_from_key_devices_and_torch(
    wanted: str, device: torch.device, nccl: bool, found: tuple[str, int]
) -> None:
    """With torch each stage has a communicator of its own."""
    with patch.object(dist, "is_nccl_available", lambda: nccl):
        assert library(wanted, FakeWorld(), device) == found


@pytest.mark.parametrize(
    ("shard", "dp", "sends_over", "found"),
    [
        ("state", 2, "mpi", "torch nccl"),
        ("gradients", 1, "mpi", "torch nccl"),
        ("gradients", 2, "nccl", "torch nccl"),
        ("gradients", 2, "mpi", "horovod"),
    ],
)
def test_no_host_is_ahead_of_those_whose_horovod_waits_for_the_gpu(
    shard: str, dp: int, sends_over: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FakeWorld()
    monkeypatch.setattr(world, "backend_for", lambda device: sends_over)
    with patch.object(dist, "is_nccl_available", lambda: True):
        assert library("auto", world, GPU, shard, dp)[0] == found


def on_two(wanted: str, nccl_of: Callable[[int], bool]) -> list[Any]:
    """What two ranks do whose torches differ."""
    own = threading.local()

    def uses_torch(world: World) -> bool:
        own.rank = world.rank
        return tensor_backend._uses_torch(wanted, world, GPU)

    with patch.object(dist, "is_nccl_available", lambda: nccl_of(own.rank)):
        return on_ranks(make_worlds(2), uses_torch)


def test_ranks_agree_where_one_has_no_nccl() -> None:
    assert on_two("auto", lambda rank: True) == [True, True]
    assert on_two("auto", lambda rank: rank == 0) == [False, False]
    told = "rank 1: communication.tensor_backend=torch: this torch has no torch.distributed over nccl; "
    for error in on_two("torch", lambda rank: rank == 0):
        assert isinstance(error, AgreedError) and str(error) == told + "it can be horovod or auto"


def test_a_failed_connection_names_the_way_without() -> None:
    def fail(*_: Any) -> None:
        raise AgreedError("rank 1: torch.distributed: no store", 1)

    mesh: Any = SimpleNamespace(device=CPU, devices=(CPU,), tp_group=None)
    config = load(overrides=["parallel.tensor=2", "communication.tensor_backend=torch"])
    with patch.object(torch_group, "TorchWorld", fail), pytest.raises(UserError) as raised:
        connect_stages(config, FakeWorld(), mesh)
    assert str(raised.value) == (
        "rank 1: torch.distributed: no store; communication.tensor_backend=horovod does without"
    )


class Doubled:
    """Both ranks have the same values; the sum is there after the wait."""

    rank, size = 0, 2

    def __init__(self, has_bfloat16: bool) -> None:
        self.has_bfloat16 = has_bfloat16
        self.sent: list[torch.dtype] = []

    def all_reduce_async_(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        self.sent.append(tensor.dtype)
        return lambda: tensor.mul_(2)

    def all_gather_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        raise NotImplementedError


@pytest.mark.parametrize(("has_bfloat16", "sent"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_travels_as_it_is_where_the_library_has_it(has_bfloat16: bool, sent: torch.dtype) -> None:
    ranks = Doubled(has_bfloat16)
    values = torch.tensor([1.5, -3.0], dtype=torch.bfloat16)
    wait = RankTensorGroup(ranks, "layer").sum_(values)
    assert values.tolist() == [1.5, -3.0]
    wait()
    assert values.tolist() == [3.0, -6.0] and values.dtype == torch.bfloat16
    assert ranks.sent == [sent]


class Stream:
    """Reaches its marks one after the other, when it is told to."""

    def __init__(self) -> None:
        self.marks, self.reached, self.is_current = 0, 0, False

    def mark(self) -> Any:
        self.marks += 1
        return SimpleNamespace(query=partial(self._reached, self.marks))

    @contextmanager
    def device(self) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False

    def _reached(self, number: int) -> bool:
        assert self.is_current, "another thread's device is GPU 0"
        return self.reached >= number


def test_the_watchdog_sees_the_collective_that_a_stream_is_in() -> None:
    stream, link = Stream(), World().link
    waits = StreamWaits(stream.mark, stream.device)
    link.stream_waits.append(waits.now)
    for name in ("first", "second"):
        waits.add(name, waits.mark())
    seen = []
    for stream.reached in range(5):  # noqa: B007
        with link.waits_for("bucket.0"):
            seen.append(list(link.waiting))
    assert seen == [["bucket.0"], ["first", "bucket.0"], ["bucket.0"], ["second", "bucket.0"], ["bucket.0"]]
