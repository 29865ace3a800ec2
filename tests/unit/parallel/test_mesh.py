"""Which replica a rank is, and which device it computes on, or a clear word why it cannot."""

from collections.abc import Sequence

import pytest
import torch
from fake_world import FakeWorld
from thread_world import make_worlds, on_ranks

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.parallel.mesh import ParallelMesh, process_groups

STREAMS: list[str] = []  # on which this thread computes


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """Pretends that this host has so many GPUs; the list gets those that are chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", STREAMS.append)
    STREAMS.clear()
    return chosen


def test_alone_it_is_the_only_replica() -> None:
    layout = ParallelMesh.of(load(overrides=["training.device=cpu"]), World())
    assert (layout.dp, layout.tp, layout.dp_rank, layout.tp_rank) == (1, 1, 0, 0)
    assert layout.devices == (torch.device("cpu"),)
    assert layout.dp_group.size == layout.tp_group.size == 1


def test_every_rank_is_a_replica() -> None:
    layout = ParallelMesh.of(load(overrides=["training.device=cpu"]), FakeWorld(rank=2, size=5))
    assert (layout.dp, layout.dp_rank) == (5, 2)


def test_a_device_that_is_not_there_is_told_with_host_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    world = FakeWorld(rank=1)
    world.local_rank, world.local_size, world.host = 1, 2, "node7"
    with pytest.raises(UserError) as caught:
        ParallelMesh.of(load(overrides=["training.device=cuda"]), world)
    message = str(caught.value)
    assert message.startswith("training.device=cuda: host node7 has 1 GPUs for 2 ranks")
    assert "training.device=cpu" in message


def test_auto_takes_a_gpu_a_rank_where_every_rank_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpus(monkeypatch, 2)
    world = FakeWorld(rank=3, size=4)
    world.local_rank, world.local_size = 1, 2
    assert ParallelMesh.of(load(), world).device == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)] and STREAMS == ["stream of cuda:1"]


def test_auto_is_the_cpu_for_all_where_one_rank_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpus(monkeypatch, 2)
    worlds = make_worlds(3)
    worlds[1].local_rank = 2  # one GPU too few on its host
    found = on_ranks(worlds, lambda world: ParallelMesh.of(load(), world).device)
    assert found == [torch.device("cpu")] * 3
    assert chosen == []


def test_each_stage_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpus(monkeypatch, 4)
    world = FakeWorld(rank=3, size=4)
    world.local_rank, world.local_size = 1, 2
    layout = ParallelMesh.of(load(overrides=["parallel.pipeline=2"]), world)
    assert layout.devices == (torch.device("cuda", 2), torch.device("cuda", 3))
    # The device of the last stream that is set becomes the current one.
    assert chosen == [torch.device("cuda", 2)] and STREAMS == ["stream of cuda:3", "stream of cuda:2"]


def test_too_few_gpus_for_the_stages_is_told_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 5)
    world = FakeWorld(rank=1)
    world.local_rank, world.local_size, world.host = 1, 2, "node7"
    with pytest.raises(UserError) as caught:
        ParallelMesh.of(load(overrides=["training.device=cuda", "parallel.pipeline=4"]), world)
    assert str(caught.value).startswith("training.device=cuda: host node7 has 5 GPUs for 2 ranks × 4 stages")
    assert "at most 1 ranks" in str(caught.value)


def test_on_the_cpu_every_stage_is_a_thread() -> None:
    layout = ParallelMesh.of(load(overrides=["training.device=cpu", "parallel.pipeline=3"]), World())
    assert layout.devices == (torch.device("cpu"),) * 3


def shared(world: FakeWorld, *words: str) -> ParallelMesh:
    return ParallelMesh.of(load(overrides=["training.device=cpu", "parallel.tensor=2", *words]), world)


class GroupedWorld(FakeWorld):
    """Remembers the groups that are asked for."""

    def group(self, ranks: Sequence[int], *, prompt: bool = False) -> Group:
        self.asked = [*getattr(self, "asked", []), list(ranks)]
        return Group(self.link, ranks, list(ranks).index(self.rank))


def test_neighbours_share_matrices_and_the_others_are_replicas() -> None:
    for rank, (replica, shard) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]):
        world = GroupedWorld(rank, size=6)
        layout = shared(world)
        assert (layout.dp, layout.tp, layout.dp_rank, layout.tp_rank) == (3, 2, replica, shard)
        assert world.asked == [[shard, shard + 2, shard + 4], [2 * replica, 2 * replica + 1]]
        assert (layout.dp_group.rank, layout.tp_group.rank) == (replica, shard)


def test_every_rank_knows_all_groups_that_are_not_the_world_or_one_rank() -> None:
    assert process_groups(4, 1) == []  # the world itself
    assert [list(group) for group in process_groups(4, 2)] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert process_groups(4, 4) == []
    assert process_groups(5, 2) == []


def test_a_world_that_cannot_be_shared_so_is_refused_with_what_can() -> None:
    with pytest.raises(UserError, match=r"must divide the job's number of ranks, 9: it can be 1, 3, 9"):
        shared(FakeWorld(size=9))


def test_matrices_across_hosts_are_told_with_the_cost_or_refused() -> None:
    world = GroupedWorld(rank=0, size=4)
    world.hosts = ["a", "b", "b", "c"]
    # 4 blocks × 4 sums × 8 × 128 tokens × 192 numbers of 4 bytes
    told = (
        "the ranks 0, 1 of one tensor group are on hosts a, b: 12 MiB of activations per accumulation step go between"
    )
    assert str(shared(world).across_hosts(load(), world)).startswith(told)
    with pytest.raises(UserError, match=f"parallel.tensor_across_hosts=never: {told}"):
        shared(world, "parallel.tensor_across_hosts=never")
    world.hosts = ["a", "a", "b", "b"]
    assert shared(world, "parallel.tensor_across_hosts=never").across_hosts(load(), world) is None
