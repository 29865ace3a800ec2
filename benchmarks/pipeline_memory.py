"""Memory of a pipeline's activations: both schedules, with and without recompute, 4 stages, 8 micro-batches.

Each in a process of its own, which counts in two ways:

saved    the tensors that autograd keeps for backward, in bytes, each stage's peak. A block that is computed again
         keeps its input alone; what that one block keeps while it is computed again is not counted.
process  how far the process's peak (VmHWM) lies above what it had before the step.

A stage's peak divided by what a single micro-batch saves there is how many it held.
"""

import ctypes
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Literal

import click
import torch
from torch import Tensor

from benchmarks.workload import PIPELINE, SyntheticTask, make_config
from hvd_transformer.atomic import write_text
from hvd_transformer.data.sampler import Replica
from hvd_transformer.parallel.pipeline import Pipeline, Stage
from hvd_transformer.parallel.schedule import make_schedule, most_in_flight

Kind = Literal["gpipe", "1f1b"]
Recompute = Literal["never", "always"]
KINDS: tuple[Kind, ...] = ("gpipe", "1f1b")
RECOMPUTES: tuple[Recompute, ...] = ("never", "always")
CUT = (3, 2, 2, 3)  # 2 blocks a stage; the embedding with the first, the head with the last
MICRO_BATCHES = 8
_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """One process's figures, in bytes and by stage."""

    schedule: Kind
    recompute: Recompute
    saved: list[int]  # the peak
    single: list[int]  # what one micro-batch alone saves
    process: int

    @property
    def held(self) -> list[float]:
        """Micro-batches that each stage held at its peak."""
        return [peak / one for peak, one in zip(self.saved, self.single, strict=True)]

    @property
    def allowed(self) -> list[int]:
        """Micro-batches that each stage may hold: all with gpipe, N - s with 1f1b."""
        return [most_in_flight(operations) for operations in make_schedule(self.schedule, len(CUT), MICRO_BATCHES)]

    @property
    def as_promised(self) -> bool:
        """A hundredth is for what a stage saves beside its micro-batches."""
        return all(held <= allowed + 0.01 for held, allowed in zip(self.held, self.allowed, strict=True))


class SavedTensors:
    """Counts the bytes that autograd saves in the thread that enters it, until that leaves; weights do not count."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._users: dict[int, int] = {}  # of each storage, by its address
        self._bytes = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def enter(self) -> None:
        self._hooks.__enter__()

    def leave(self) -> None:
        self._hooks.__exit__()

    def add(self, address: int, size: int) -> None:
        self._users[address] = self._users.get(address, 0) + 1
        if self._users[address] == 1 and address not in self._weights:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)

    def remove(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if self._users[address] == 0 and address not in self._weights:
            self._bytes -= size

    def take_peak(self) -> int:
        """Since the last call."""
        peak, self.peak = self.peak, self._bytes
        return peak

    def _pack(self, tensor: Tensor) -> "_Saved":
        return _Saved(self, tensor)


class _Saved:
    """One saved tensor, until autograd lets go of it."""

    def __init__(self, counter: SavedTensors, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._counter, self._place = tensor, counter, (storage.data_ptr(), storage.nbytes())
        counter.add(*self._place)

    def __del__(self) -> None:
        self._counter.remove(*self._place)


def measure(kind: Kind, recompute: Recompute) -> Memory:
    """One step in this process, after one of a single micro-batch, which also makes the gradients."""
    torch.set_num_threads(1)
    config = make_config(PIPELINE)
    task = SyntheticTask(config, Replica(0, 1))
    inputs, targets = task.batch(0, range(task.batch_size))
    size = task.batch_size // MICRO_BATCHES
    pieces = zip(inputs.split(size), targets.split(size), strict=True)
    micro_batches = [task.micro_batch(piece) for piece in pieces]
    stages = [
        Stage(task.layers[start:stop], torch.device("cpu")) for start, stop in pairwise(accumulate(CUT, initial=0))
    ]
    pipeline = Pipeline(stages, schedule=kind, recompute=recompute, context=lambda number: nullcontext())
    weights = list(task.model.parameters())
    counters = [SavedTensors(weights) for _ in stages]
    # In the workers themselves: hooks are a thread's own. Not in `context`, which is inside a checkpoint: there they
    # would take the tensors from the checkpoint, and keep them.
    pipeline.map(lambda stage: counters[stage].enter())
    pipeline.train(micro_batches[:1], 1.0)
    single = [counter.take_peak() for counter in counters]
    ctypes.CDLL(None).malloc_trim(0)
    before = _reset_peak()
    pipeline.train(micro_batches, 1.0)
    process = _status("VmHWM") - before
    saved = [counter.take_peak() for counter in counters]
    pipeline.map(lambda stage: counters[stage].leave())
    pipeline.close()
    return Memory(kind, recompute, saved, single, process)


def _reset_peak() -> int:
    """Makes the process's peak what it has now, and returns that."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmHWM")


def _status(key: str) -> int:
    """Bytes, from this process's /proc status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def measure_all() -> list[Memory]:
    """Each in a new process, one after the other."""
    memories = []
    for kind, recompute in product(KINDS, RECOMPUTES):
        # Started anew, not forked: a child would have its parent's memory.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            memories.append(process.submit(measure, kind, recompute).result())
    return memories


def table(memories: Sequence[Memory]) -> str:
    """The figures for people."""
    stages = range(len(CUT))
    lines = [
        f"{'':17}  saved at the peak, MiB{'':{7 * len(CUT) - 14}}    micro-batches held",
        f"{'schedule':8} {'recompute':8} "
        + "".join(f"{f'stage {stage}':>8}" for stage in stages)
        + f"{'sum':>8}  "
        + "".join(f"{stage:>6}" for stage in stages)
        + f"{'process, MiB':>14}",
    ]
    lines += [
        f"{memory.schedule:8} {memory.recompute:9}"
        + "".join(f"{saved / _MIB:>8.1f}" for saved in [*memory.saved, sum(memory.saved)])
        + "  "
        + "".join(f"{held:>6.2f}" for held in memory.held)
        + f"{memory.process / _MIB:>14.1f}"
        for memory in memories
    ]
    verdict = "no stage held more" if all(memory.as_promised for memory in memories) else "A STAGE HELD MORE"
    lines += ["", f"gpipe may hold {MICRO_BATCHES} micro-batches a stage, 1f1b N - s in stage s of N: {verdict}"]
    return "\n".join(lines)


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this file, too.")
def main(file: Path | None) -> None:
    """Measure the memory of activations in a pipeline of 4 stages; fails where a stage holds more than it may."""
    memories = measure_all()
    click.echo(table(memories))
    if file is not None:
        write_text(file, json.dumps([{**asdict(memory), "held": memory.held} for memory in memories], indent=1) + "\n")
    sys.exit(not all(memory.as_promised for memory in memories))


if __name__ == "__main__":
    main()
