"""The ranks that `benchmarks.wake_up` starts: `python -m benchmarks.wake_up_ranks KIND FILE`. Rank 0 writes FILE.

horovod   the package's own collectives with its defaults, under horovodrun
torch     torch.distributed over gloo, under torchrun
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import torch
from torch import Tensor

from benchmarks.wake_up import CASES, LATE_SECONDS
from hvd_transformer.atomic import write_text
from hvd_transformer.comm.world import World

Start = Callable[[Tensor, str], Callable[[], object]]
SETTLE_SECONDS, IDLE_SECONDS = 3.0, 3.0


def measure(rank: int, start: Start) -> dict[str, float]:
    """By case: milliseconds, the median of many; of the idle ranks, the CPU of this one in % of a core."""
    small, large = torch.ones(256), torch.ones(2 << 20)  # 1 KB, 8 MB

    def sum_small() -> None:
        start(small, "small")()

    def sum_both() -> None:
        for end in [start(large, "large"), start(small, "small")]:
            end()

    def sum_late() -> None:
        if rank == 1:
            time.sleep(LATE_SECONDS)
        sum_small()

    latencies = [
        _milliseconds(sum_small, 300),
        _milliseconds(sum_both, 40),
        _milliseconds(sum_late, 60, before=sum_small),
    ]
    time.sleep(SETTLE_SECONDS)
    began, cpu = time.perf_counter(), time.process_time()
    time.sleep(IDLE_SECONDS)
    idle = 100 * (time.process_time() - cpu) / (time.perf_counter() - began)
    sum_small()
    return dict(zip(CASES, [*latencies, idle], strict=True))


def _milliseconds(action: Callable[[], None], count: int, before: Callable[[], None] | None = None) -> float:
    """The median of `count` calls, after some unmeasured ones; `before` each, unmeasured, the ranks may meet."""
    seconds = []
    for _ in range(count // 10 + count):
        if before is not None:
            before()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return 1000 * median(seconds[count // 10 :])


def horovod(file: Path) -> None:
    """Ours."""
    world = World.start()
    figures = measure(world.rank, world.all_reduce_async_)
    if world.rank == 0:
        write_text(file, json.dumps(figures))
    world.close()


def torch_gloo(file: Path) -> None:
    """The peer."""
    torch.distributed.init_process_group("gloo")

    def start(tensor: Tensor, name: str) -> Callable[[], object]:
        work = torch.distributed.all_reduce(tensor, async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        return wait

    figures = measure(torch.distributed.get_rank(), start)
    if torch.distributed.get_rank() == 0:
        write_text(file, json.dumps(figures))
    torch.distributed.destroy_process_group()


@click.command()
@click.argument("kind", type=click.Choice(["horovod", "torch"]))
@click.argument("file", type=click.Path(path_type=Path))
def main(kind: str, file: Path) -> None:
    """One rank."""
    (horovod if kind == "horovod" else torch_gloo)(file)


if __name__ == "__main__":
    main()
