"""A world of one needs no Horovod, and a user's error on one rank is raised on all."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from fake_world import FakeWorld

from hvd_transformer.comm.world import AgreedError, World, agree
from hvd_transformer.errors import UserError

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("horovod", "mpi4py"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Block())
from hvd_transformer.comm.world import World
from hvd_transformer.errors import UserError
try:
    world = World.start()
    world.barrier()
    world.close()
    print(world.rank, world.size, world.local_rank, world.local_size, world.backend)
except UserError as error:
    print("refused:", error)
"""


def start(**launcher: str) -> str:
    """World.start() without Horovod and MPI."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMI_"))}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], env={**clean, **launcher}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_alone_horovod_is_not_needed() -> None:
    assert start() == "0 1 0 1 none\n"


def test_launched_ranks_are_told_that_horovod_is_missing() -> None:
    message = start(HOROVOD_RANK="1", HOROVOD_SIZE="4")
    assert message.startswith("refused: started as one of 4 ranks, but Horovod cannot be imported (No module named")
    assert message.count("\n") == 1 and "docker/build_horovod.sh" in message


def test_alone_collectives_change_nothing() -> None:
    world = World()
    tensor = torch.tensor([1.0, 2.0])
    world.all_reduce_async_(tensor, "a")()
    assert world.all_reduce_(tensor, "b") is tensor and world.broadcast_(tensor, "c") is tensor
    assert tensor.tolist() == [1.0, 2.0]
    assert world.all_gather_objects({"a": [1]}) == [{"a": [1]}]
    assert world.broadcast_object("x") == "x"
    world.barrier()
    world.close()


def refuse() -> Any:
    raise UserError("data.source=x: no such folder")


def test_agree_gives_each_rank_its_own_result() -> None:
    assert agree(World(), lambda: 42) == 42
    world = FakeWorld(0, 3)
    assert agree(world, lambda: [1]) == [1]
    assert world.events == ["gather"]


def test_a_mistake_on_rank_0_is_told_as_it_is() -> None:
    with pytest.raises(AgreedError) as caught:
        agree(FakeWorld(0, 2), refuse)
    assert str(caught.value) == "data.source=x: no such folder"


def test_a_mistake_elsewhere_is_raised_here_with_its_rank() -> None:
    world = FakeWorld(0, 3, others=lambda mine: [mine, None, "host b has no such folder"])
    with pytest.raises(AgreedError) as caught:
        agree(world, lambda: "well done")
    assert str(caught.value) == "rank 2: host b has no such folder"


def test_the_first_of_several_mistakes_is_told_by_all() -> None:
    for rank in (0, 1):
        world = FakeWorld(rank, 3, others=lambda mine: [None, "first", "second"])
        with pytest.raises(AgreedError, match="^rank 1: first$"):
            agree(world, lambda: None)


def test_other_errors_are_not_hidden() -> None:
    world = FakeWorld()
    with pytest.raises(ZeroDivisionError):
        agree(world, lambda: 1 // 0)
    assert world.events == []
