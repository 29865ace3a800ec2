"""What the library of a tensor group is asked for, and what the watchdog sees of it."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.torch_group import TorchWorld
from hvd_transformer.comm.world import World
from hvd_transformer.parallel.tensor_parallel import RankTensorGroup


def train(words: list[str]) -> dict[str, Any]:
    """Runs `hvd-train`: how many collectives of layers went over each library, and what is left open."""
    from commands import command

    calls: Counter[str] = Counter()
    open_during_calls: set[bool] = set()

    def counted(original: Callable[..., Any], library: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if library == "torch" or given[2].startswith("tensor."):
                calls[f"{library} {given[1 if library == 'horovod' else 0].dtype}"] += 1
                open_during_calls.add(library == "horovod" or dist.is_initialized())
            return original(*given, **options)

        return call

    with (
        patch.object(dist, "all_reduce", counted(dist.all_reduce, "torch")),
        patch.object(Group, "all_reduce_async_", counted(Group.all_reduce_async_, "horovod")),
    ):
        done = command("hvd-train", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert False not in open_during_calls  # gloo's groups work on, but NCCL's end with the world
    return {"calls": calls, "open": dist.is_initialized()}


def collectives(num_stages: int) -> dict[str, Any]:
    """Each rank starts the sums of its stages in another order; those of one stage meet those of this stage."""
    world = World.start()
    torch_world = TorchWorld(world, world, "gloo", [torch.device("cpu")] * num_stages)
    groups = [RankTensorGroup(ranks, f"stage{number}") for number, ranks in enumerate(torch_world.communicators)]
    values = [torch.full((3,), 10.0 ** (2 * number) * (world.rank + 1)) for number in range(num_stages)]
    order = range(num_stages) if world.rank == 0 else reversed(range(num_stages))
    waits = [groups[number].sum_(values[number]) for number in order]
    for wait in waits:
        wait()
    narrow = torch.tensor([1.0, 2.0**-8 * world.rank], dtype=torch.bfloat16)
    groups[0].sum_(narrow)()
    gathered = groups[-1].gather(torch.tensor([[world.rank, 7]]))
    seen: dict[str, int] = {}
    ended = world.link.ended
    if world.rank == 1:
        time.sleep(1)
    else:
        threading.Timer(0.3, lambda: seen.update(world.link.waiting)).start()
    groups[0].sum_(torch.ones(1))()
    torch_world.close()
    return {
        "sums": [own.tolist() for own in values],
        "narrow": narrow.tolist(),
        "gathered": gathered.tolist(),
        "seen": list(seen),
        "after": list(world.link.waiting),
        "ended": world.link.ended - ended,
        "open": dist.is_initialized(),
    }
