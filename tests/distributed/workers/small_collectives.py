"""Many small collectives from several threads, in another order on every rank: small_collectives.py COUNT.

Each result is compared with what it must be. COUNT are those of one rank, half of them before a shutdown and a
new init (published Horovod gets no second one: with a cycle time set, it ends with a segmentation fault).
"""

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_transformer.comm.horovod_env import horovod_wakes_up, launched, set_defaults

THREADS = 3
AT_ONCE = 32
KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "grouped")


def start(kind: str, name: str, length: int, where: hvd.ProcessSet) -> Callable[[], None]:
    """Starts one; returns the function that waits for it and checks the result."""
    members = where.ranks or list(range(hvd.size()))
    own = torch.arange(length * len(members)) + 1000 * hvd.rank()  # 64-bit integers: sums are exact
    everyone = [torch.arange(length * len(members)) + 1000 * rank for rank in members]
    more = {"name": name, "process_set": where}
    expected: list[Tensor]
    if kind == "all_reduce":
        handle, expected = hvd.allreduce_async(own, op=hvd.Sum, **more), [sum(everyone)]
    elif kind == "all_gather":
        handle, expected = hvd.allgather_async(own, **more), [torch.cat(everyone)]
    elif kind == "broadcast":
        handle, expected = hvd.broadcast_async(own, root_rank=members[-1], **more), [everyone[-1]]
    elif kind == "reduce_scatter" and len(members) != 3:  # gloo's own can lose data with three ranks
        part = slice(length * members.index(hvd.rank()), length * (members.index(hvd.rank()) + 1))
        handle, expected = hvd.reducescatter_async(own, op=hvd.Sum, **more), [sum(everyone)[part]]
    else:
        handle = hvd.grouped_allreduce_async([own, own + 1], op=hvd.Sum, **more)
        expected = [sum(everyone), sum(everyone) + len(members)]

    def check() -> None:
        result = hvd.synchronize(handle)
        found = [result] if isinstance(result, Tensor) else list(result)
        assert len(found) >= len(expected), f"{name} of {members}: {len(found)} results"
        # What follows the tensors of an allgather says how many rows each rank gave.
        for tensor, wanted in zip(found, expected, strict=False):
            assert torch.equal(tensor, wanted), f"{name} of {members}: {tensor} instead of {wanted}"

    return check


def run(thread: int, seed: int, count: int, sets: list[hvd.ProcessSet]) -> None:
    """`count` collectives: all ranks draw the same ones, and each shuffles them in its own way."""
    same, own = random.Random(1000 * seed + thread), random.Random(1000 * hvd.rank() + 10 * seed + thread)
    for _ in range(count // AT_ONCE):
        # A name keeps its kind, mostly its length too: as in training, most are known from before.
        drawn = [(index, same.choice([8, 8, 8, 300]), same.randrange(len(sets))) for index in range(AT_ONCE)]
        drawn = [(index, length, sets[number]) for index, length, number in drawn]
        own.shuffle(drawn)
        checks = []
        for index, length, where in drawn:
            if where.ranks is None or hvd.rank() in where.ranks:
                checks.append(start(KINDS[index % len(KINDS)], f"{thread}.{index}.{where.ranks}", length, where))
            if own.random() < 0.02:
                time.sleep(own.choice([0.001, 0.005]))
        own.shuffle(checks)
        for check in checks:
            check()


def main() -> None:
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        import mpi4py.MPI  # noqa: F401  # MPI that Horovod has started ends with its shutdown, for ever
    set_defaults(launched().local_size)
    failures: list[str] = []

    def guarded(*arguments: object) -> None:
        try:
            run(*arguments)
        except BaseException:
            failures.append(traceback.format_exc())

    began = time.perf_counter()
    rounds = 2 if horovod_wakes_up() else 1
    for seed in range(rounds):
        time.sleep(2 * seed)  # a rank that is early would find gloo's addresses of the first init
        sets = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [2, 3], [1, 2], [0, 1, 3])]
        hvd.init(process_sets=sets)
        assert hvd.size() == 4
        members = [hvd.global_process_set, *sets]
        share = int(sys.argv[1]) // rounds // THREADS
        threads = [threading.Thread(target=guarded, args=(number, seed, share, members)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            sys.exit(failures[0])
        hvd.allreduce(torch.zeros(1), name="end")
        hvd.shutdown()
    if launched().rank == 0:
        print(f"done in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
