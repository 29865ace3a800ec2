"""Which replica a rank is, and with whom it shares matrices."""

from collections.abc import Sequence

import pytest
import torch
from fake_world import FakeWorld

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.parallel.mesh import ParallelMesh, process_groups


def test_alone_it_is_the_only_replica() -> None:
    layout = ParallelMesh.of(load(overrides=["training.device=cpu"]), World())
    assert (layout.dp, layout.tp, layout.dp_rank, layout.tp_rank) == (1, 1, 0, 0)
    assert layout.devices == (torch.device("cpu"),)
    assert layout.dp_group.size == layout.tp_group.size == 1


def test_every_rank_is_a_replica() -> None:
    layout = ParallelMesh.of(load(overrides=["training.device=cpu"]), FakeWorld(rank=2, size=5))
    assert (layout.dp, layout.dp_rank) == (5, 2)


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
