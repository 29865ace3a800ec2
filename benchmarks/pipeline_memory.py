"""Memory of a pipeline's activations against what `plan` says: every schedule and recompute setting, 4 stages.

Each in a process of its own, which runs three steps and counts in three ways:

allocated  the bytes of all tensors that a stage's operations made and that are alive, each stage's peak: activations,
           what one block makes while it is computed again, gradients on their way. Weights and their gradients were
           there before. The plan's figures are of the same.
held       the tensors that autograd keeps for backward, each stage's peak divided by what a single micro-batch keeps
           there: so many micro-batches it held (with `except_last` counted in whole ones).
process    how far the process's peak (VmHWM) lies above what it had before the step.
"""

import ctypes
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.saved_tensors import SavedTensors
from benchmarks.workload import PIPELINE, SyntheticTask, make_config
from hvd_transformer.atomic import write_text
from hvd_transformer.data.sampler import Replica
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.parallel.pipeline import Pipeline, Recompute, Stage
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES, ScheduleName, make_schedule
from hvd_transformer.planning.layer_profile import ParameterGrads
from hvd_transformer.planning.memory_plan import RECOMPUTES, make_plan
from hvd_transformer.planning.pass_memory import PASS_MODES, AllocationTracker, PassMemory, stage_activations

CUT = (3, 2, 2, 3)  # 2 blocks a stage; the embedding with the first, the head with the last
CONFIG = make_config([*PIPELINE, f"parallel.pipeline={len(CUT)}", f"parallel.partition={list(CUT)}"])
TOLERANCE = 0.15  # between the plan and what is measured
_MIB = 2**20
# Counts micro-batches.
_ONE = dict.fromkeys(PASS_MODES, PassMemory(inputs=0, forward=1, kept=1, backward=1, late=1))


@dataclass(frozen=True)
class Memory:
    """One process's figures, in bytes and by stage."""

    schedule: ScheduleName
    recompute: Recompute
    allocated: list[int]  # at the peak
    held: list[float]  # micro-batches at the peak
    process: int

    @property
    def as_promised(self) -> bool:
        """A hundredth is for what a stage saves beside its micro-batches."""
        schedule = make_schedule(self.schedule, len(CUT), CONFIG.parallel.micro_batches)
        return all(
            held <= stage_activations(own, 0, "never", _ONE) + 0.01
            for held, own in zip(self.held, schedule, strict=True)
        )


def measure(kind: ScheduleName, recompute: Recompute) -> Memory:
    """Some steps in this process."""
    torch.set_num_threads(1)
    task = SyntheticTask(CONFIG, Replica(0, 1))
    inputs, targets = task.batch(0, range(task.batch_size))
    size = task.batch_size // CONFIG.parallel.micro_batches
    pieces = zip(inputs.split(size), targets.split(size), strict=True)
    micro_batches = [task.micro_batch(piece) for piece in pieces]
    _prepare_gradients(task)
    # Numbered CPUs have the pipeline copy from stage to stage, as between GPUs: each stage holds its own.
    stages = [
        Stage(task.layers[start:stop], torch.device("cpu", number))
        for number, (start, stop) in enumerate(pairwise(accumulate(CUT, initial=0)))
    ]
    pipeline = Pipeline(stages, schedule=kind, recompute=recompute)
    for stage in stages:
        _defer_weight_grads(stage)
    weights = list(task.model.parameters())
    saved = [SavedTensors(weights) for _ in stages]
    # In the workers themselves: hooks and modes are a thread's own. Not in `context`, which is inside a checkpoint:
    # there the hooks would take the tensors from the checkpoint, and keep them.
    pipeline.map(lambda stage: saved[stage].enter())
    pipeline.forward_backward([micro_batches[:1]], 1.0, [].append)
    single = [counter.take_peak() for counter in saved]
    pipeline.forward_backward([micro_batches], 1.0, [].append)
    held = [counter.take_peak() / one for counter, one in zip(saved, single, strict=True)]
    pipeline.map(lambda stage: saved[stage].leave())
    allocated = [AllocationTracker() for _ in stages]
    pipeline.map(lambda stage: allocated[stage].__enter__())
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    pipeline.forward_backward([micro_batches], 1.0, [].append)
    process = status("VmHWM") - before
    pipeline.map(lambda stage: allocated[stage].__exit__(None, None, None))
    pipeline.close()
    return Memory(kind, recompute, [counter.peak for counter in allocated], held, process)


def _prepare_gradients(task: SyntheticTask) -> None:
    """As in training: they are there before, and lookups add rows to theirs."""
    for weight in task.model.parameters():
        weight.grad = torch.zeros_like(weight)
    embedding = task.model.embedding.embedding
    gradient = embedding.weight.grad
    assert gradient is not None
    embedding.embedding_grads = _Rows(gradient)


class _Rows:
    """Adds lookups' gradients to the matrix."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        self._gradient.index_add_(0, tokens, rows)


def _defer_weight_grads(stage: Stage) -> None:
    """As in training: linear layers' weights get their gradients when the stage has time for it."""
    for module in (module for layer in stage.layers for module in layer.module.modules()):
        if isinstance(module, WeightGradLayer):
            module.weight_grads = ParameterGrads(module, stage.weight_grads)


def reset_peak() -> int:
    """Makes the process's peak what it has now, and returns that."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status("VmHWM")


def status(key: str) -> int:
    """Bytes, from this process's /proc status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def measure_all(schedules: Sequence[ScheduleName]) -> list[Memory]:
    """Each in a new process, one after the other."""
    memories = []
    for kind, recompute in product(schedules, RECOMPUTES):
        # Started anew, not forked: a child would have its parent's memory.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            memories.append(process.submit(measure, kind, recompute).result())
    return memories


@dataclass(frozen=True)
class Comparison:
    """What was measured of each stage and of their sum, and what the plan says of the same."""

    name: str
    measured: list[float]
    planned: list[float]

    @property
    def agrees(self) -> bool:
        """Within the tolerance."""
        pairs = zip(self.measured, self.planned, strict=True)
        return all(abs(planned / measured - 1) <= TOLERANCE for measured, planned in pairs)


def compare(memories: Sequence[Memory]) -> list[Comparison]:
    """MiB of each setting, and how many times less `always` takes than `never`."""
    stages = make_plan(CONFIG).stages
    peaks = {
        (memory.schedule, memory.recompute): Comparison(
            f"{memory.schedule} {memory.recompute}, MiB",
            _mib(memory.allocated),
            _mib([stage.activations[memory.schedule, memory.recompute] for stage in stages]),
        )
        for memory in memories
    }
    factors = []
    for schedule in dict.fromkeys(memory.schedule for memory in memories):
        never, always = peaks[schedule, "never"], peaks[schedule, "always"]
        measured, planned = _ratio(never.measured, always.measured), _ratio(never.planned, always.planned)
        factors.append(Comparison(f"{schedule} never / always", measured, planned))
    return [*peaks.values(), *factors]


def _mib(stages: Sequence[int]) -> list[float]:
    return [num_bytes / _MIB for num_bytes in [*stages, sum(stages)]]


def _ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def table(memories: Sequence[Memory], comparisons: Sequence[Comparison]) -> str:
    """The figures for people."""
    columns = [*(f"stage {stage}" for stage in range(len(CUT))), "sum"]
    lines = [f"{'allocated at the peak':38}" + "".join(f"{column:>9}" for column in columns)]
    for comparison in comparisons:
        for kind, values in (("measured", comparison.measured), ("plan", comparison.planned)):
            name = comparison.name if kind == "measured" else ""
            lines.append(f"{name:29} {kind:8}" + "".join(f"{value:9.2f}" for value in values))
    agree = all(comparison.agrees for comparison in comparisons)
    lines += [f"the plan is {'' if agree else 'NOT '}within {TOLERANCE:.0%} of what is measured", ""]
    lines += [f"{'micro-batches held':38}" + "".join(f"{column:>9}" for column in columns[:-1]) + "  process, MiB"]
    for memory in memories:
        held = "".join(f"{held:9.2f}" for held in memory.held)
        lines.append(f"{memory.schedule + ' ' + memory.recompute:38}{held}{memory.process / _MIB:14.1f}")
    verdict = "no stage held more" if all(memory.as_promised for memory in memories) else "A STAGE HELD MORE"
    all_of_them = CONFIG.parallel.micro_batches
    lines.append(f"Stage s of N may hold {all_of_them} with gpipe, N - s with 1f1b, N with zero_bubble: {verdict}")
    return "\n".join(lines)


@click.command()
@click.option(
    "--schedule", "schedules", type=click.Choice(SCHEDULES), multiple=True, default=SCHEDULES, help="Only this."
)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this file, too.")
def main(schedules: tuple[ScheduleName, ...], file: Path | None) -> None:
    """Measure the memory of activations in a pipeline of 4 stages.

    Fails where a stage holds more micro-batches than it may, or the plan is wrong.
    """
    memories = measure_all(schedules)
    comparisons = compare(memories)
    click.echo(table(memories, comparisons))
    if file is not None:
        figures = {"memories": list(map(asdict, memories)), "comparisons": list(map(asdict, comparisons))}
        write_text(file, json.dumps(figures, indent=1) + "\n")
    sys.exit(not all(part.as_promised for part in memories) or not all(part.agrees for part in comparisons))


if __name__ == "__main__":
    main()
