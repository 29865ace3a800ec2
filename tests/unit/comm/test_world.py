"""A world of one needs no Horovod, and a user's error on one rank is raised on all."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch
from fake_world import FakeWorld
from thread_world import make_worlds, on_ranks

from hvd_transformer.comm import group
from hvd_transformer.comm.world import AgreedError, World, agree
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.training.job_setup import check_same_configuration, check_same_data

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
    assert world.gather_objects({"a": [1]}) == [{"a": [1]}]
    assert world.broadcast_object("x") == "x"
    assert world.first_object(None) is None and world.first_object("x") == (0, "x")
    world.barrier()
    world.close()


def told(worlds: list[World], messages: Mapping[int, str]) -> list[object]:
    """The result of `agree` on each rank, or the text of its error; the ranks in `messages` refuse."""

    def act(world: World) -> object:
        def action() -> str:
            if world.rank in messages:
                raise UserError(messages[world.rank])
            return f"done {world.rank}"

        try:
            return agree(world, action)
        except AgreedError as error:
            return str(error)

    return on_ranks(worlds, act)


def test_agree_gives_each_rank_its_own_result() -> None:
    assert agree(World(), lambda: 42) == 42
    assert told(make_worlds(3), {}) == ["done 0", "done 1", "done 2"]


def test_a_mistake_is_raised_on_all_ranks_with_its_rank_unless_that_is_0() -> None:
    assert told(make_worlds(3), {0: "data.source=x: no such folder"}) == ["data.source=x: no such folder"] * 3
    assert told(make_worlds(3), {2: "host b has no such folder"}) == ["rank 2: host b has no such folder"] * 3
    with pytest.raises(AgreedError, match="^no such key$"):
        agree(World(), lambda: refuse("no such key"))


def refuse(message: str) -> None:
    raise UserError(message)


def test_the_first_of_several_mistakes_is_told_by_all() -> None:
    assert told(make_worlds(4), {1: "first", 2: "second", 3: "third"}) == ["rank 1: first"] * 4


def test_other_errors_are_not_hidden() -> None:
    world = FakeWorld()
    with pytest.raises(ZeroDivisionError):
        agree(world, lambda: 1 // 0)
    assert world.events == []


def test_objects_of_any_size_reach_the_ranks_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_MESSAGE", 100)  # a broadcast in parts
    value = {"text": "ü" * 321, "numbers": [1, 2.5, None]}

    def exchange(world: World) -> list[object]:
        return [
            world.broadcast_object(value if world.rank == 2 else None, root=2),
            world.gather_objects([world.rank]),
            world.first_object(world.rank if world.rank > 1 else None),
            world.first_object(None),
        ]

    found = on_ranks(make_worlds(4), exchange)
    assert found[0] == [value, [[0], [1], [2], [3]], (2, 2), None]
    assert found[1:] == [[value, [], (2, 2), None]] * 3


def test_more_than_can_be_gathered_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_MESSAGE", 100)
    errors = on_ranks(make_worlds(3), lambda world: world.gather_objects("x" * 40))
    assert [str(error) for error in errors] == ["the objects of 3 ranks have 126 bytes, more than 100"] * 3
    assert all(isinstance(error, ValueError) for error in errors)


def test_every_rank_learns_the_host_of_each() -> None:
    hosts = ["b", "b", "a", "c", "a"]
    worlds = make_worlds(5, hosts)
    assert on_ranks(worlds, lambda world: world._find_hosts()) == [hosts] * 5


# What a rank hands over and gets back, by the number of ranks on four hosts.
CONTROL_MESSAGES: dict[str, Callable[[World], object]] = {
    "agree": lambda world: agree(world, lambda: 1),
    "broadcast_object": lambda world: world.broadcast_object({"a": 1}),
    "first_object": lambda world: world.first_object(None),
    "check_same_configuration": lambda world: check_same_configuration(load(), world),
    "check_same_data": lambda world: check_same_data(SimpleNamespace(digest="d" * 64), world),
    "barrier": lambda world: world.barrier(),
}


@pytest.mark.parametrize("name", CONTROL_MESSAGES)
def test_control_messages_do_not_grow_with_the_world(name: str) -> None:
    used = set()
    for size in (2, 8, 64):
        worlds = make_worlds(size)
        results = on_ranks(worlds, CONTROL_MESSAGES[name])
        assert not any(isinstance(result, BaseException) for result in results), results
        used |= {(world.link.horovod.messages, world.link.horovod.bytes) for world in worlds}
    # The rank that sends an object counts it as often as those that receive it.
    assert len(used) == 1


def test_a_rank_learns_all_hosts_by_a_few_bytes_per_rank() -> None:
    for size in (4, 16, 64):
        worlds = make_worlds(size, [f"host-{rank * 4 // size}" for rank in range(size)])
        on_ranks(worlds, lambda world: world._find_hosts())
        # A number per rank, and 4 bytes per rank that say who sends how much, there and back; the names.
        assert max(world.link.horovod.bytes for world in worlds) <= 20 * size + 400


CONFIGS = {
    "": ([[], [], []], None),
    "one": (
        [[], ["seed=2", "training.epochs=5"], ["seed=3"]],
        "seed: rank 1 has 2, rank 0 has 1; every rank needs the same configuration",
    ),
    "last": (
        [[], [], ["optimizer.betas=[0.8, 0.9]"]],
        "optimizer.betas: rank 2 has [0.8, 0.9], rank 0 has [0.9, 0.95]; every rank needs the same configuration",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_the_first_difference_of_the_configurations_is_told_by_all(case: str) -> None:
    words, message = CONFIGS[case]
    found = on_ranks(make_worlds(3), lambda world: check_same_configuration(load(overrides=words[world.rank]), world))
    assert [error and str(error) for error in found] == [message] * 3


def test_the_first_host_with_other_data_is_told_by_all() -> None:
    digests, hosts = ["d", "d", "e", "f"], ["h1", "h1", "h2", "h3"]

    def compare(world: World) -> None:
        check_same_data(SimpleNamespace(digest=digests[world.rank]), world)

    found = on_ranks(make_worlds(4, hosts), compare)
    message = "data.source: host h2 has different data than host h1; copy one to all hosts"
    assert [str(error) for error in found] == [message] * 4
    digests[2:] = ["d", "d"]
    assert on_ranks(make_worlds(4, hosts), compare) == [None] * 4
