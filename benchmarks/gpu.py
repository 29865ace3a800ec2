"""Training on one GPU: model FLOPs utilization (MFU), memory beside `plan`, pipelines on one card, checkpoints.

    python -m benchmarks.gpu --json benchmarks/results/gpu.json --profile gpu-profile.txt --tests

The tests end when nine minutes have passed. Last come the goals of `gpu_goals.py`; the exit code is 1 if one is missed.
MFU is relative to the fastest dense matrix product that this card showed in the same run; attention counts in full, as
in PaLM's MFU (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). `--dry-run` does all of it in a small size on the
CPU.
"""

import gc
import math
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.command_line import write_figures
from benchmarks.gpu_cases import Case, cases
from benchmarks.gpu_goals import judge, run_tests
from hvd_transformer.bench.device import measure_device
from hvd_transformer.bench.synthetic_task import SyntheticTask
from hvd_transformer.bench.timing import call_seconds, synchronize
from hvd_transformer.checkpoint.capture import Capture
from hvd_transformer.comm.world import World
from hvd_transformer.data.sampler import Replica, StepPlan
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.device_peak import device_name, device_peak
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.training.job_setup import compile_layers, initial_weights
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer
from hvd_transformer.training.training_step import TrainingStep

WARM_UP, BLOCKS = 3, 3
MOST_SECONDS = 540.0  # with the tests


class Planned(NamedTuple):
    """What `plan` says of a step: FLOPs of forward and backward without recomputing, and bytes at the peak."""

    flops: float
    memory: float


def planned(case: Case, *, dry: bool) -> Planned:
    """From shapes alone."""
    torch.set_num_threads(1)  # beside the first measurements
    plan = make_plan(case.config(dry=dry), case.vocab_size, 1)
    flops = sum(layer.forward_flops + layer.backward_flops for layer in plan.layers) * plan.num_micro_batches
    return Planned(flops, sum(sum(plan.memory(stage)) for stage in plan.stages))


@contextmanager
def trainer(case: Case, device: torch.device, *, dry: bool) -> Iterator[Trainer]:
    """On random tokens, with random weights."""
    config, world = case.config(dry=dry), World()
    mesh = ParallelMesh.of(config, world, (device,) * config.parallel.pipeline)
    with initial_weights(config):
        task = SyntheticTask(config, case.vocab_size, Replica(0, 1))
    made = Trainer(config, world, mesh, task, TrainState(), draw=False)
    draw = torch.Generator(device).manual_seed(1)
    for name, weight in task.model.named_parameters():
        # On the card: the initial values of a billion weights take long on the host. Their scale is that of GPT-2.
        if "norm" in name:
            weight.data.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            weight.data.normal_(0.0, 0.02, generator=draw)
    if (why := compile_layers(config, task, mesh, world)) is not None:
        raise RuntimeError(why)
    try:
        yield made
    finally:
        made.close()


def measure(case: Case, device: torch.device, num_steps: int, tables: list[str] | None, *, dry: bool) -> dict[str, Any]:
    """Steps of one case: seconds, losses, memory. Adds the profiler's table to `tables`."""
    with trainer(case, device, dry=dry) as job:
        plans = job.task.sampler.epoch()
        began = time.perf_counter()
        losses = [job.step(next(plans)).totals.loss for _ in range(WARM_UP)]  # compiles and chooses kernels
        synchronize(device)
        found: dict[str, Any] = {"warm_up_seconds": time.perf_counter() - began, "losses": losses}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

        def block() -> None:
            take_steps(job, islice(plans, num_steps))

        found["seconds"] = [call_seconds(block, device) / num_steps for _ in range(BLOCKS)]
        found["peak_memory"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        found["tokens"] = job.config.training.batch_samples * job.config.data.sequence_length
        found["parameters"] = job.engine.num_parameters
        try:
            if tables is not None:
                tables.append(f"{case.name}\n{profiled(job, next(plans))}")
            if case.checkpoint:
                found["checkpoint"] = checkpoint(job)
        except Exception as error:  # what was measured is still of use
            found["not measured"] = f"{type(error).__name__}: {error}"
        return found


def take_steps(job: Trainer, plans: Iterable[StepPlan]) -> None:
    """As a job does: a step's result is read when the next one is queued."""
    queued = deque[TrainingStep]()
    for plan in plans:
        queued.append(job.queue(plan))
        if len(queued) > int(job.reads_late):
            queued.popleft().result()
    for step in queued:
        step.result()


def checkpoint(job: Trainer) -> dict[str, float]:
    """The seconds that training stands still for a checkpoint, the first one and later ones, and its bytes."""
    began = time.perf_counter()
    capture = Capture(job.engine)
    seconds = []
    for _ in range(3):
        snapshot = capture.take(0, {}, {}, best=False)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    num_bytes = sum(block.nbytes for part in snapshot.parts.values() for _, block in part.blocks)
    return {"first": seconds[0], "later": median(seconds[1:]), "bytes": num_bytes}


def profiled(job: Trainer, plan: StepPlan) -> str:
    """torch's table of where one step's time goes."""
    device = job.mesh.device
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        job.step(plan)
        synchronize(device)
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(found.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=90))


def release(device: torch.device) -> None:
    """The memory of the case before."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def row(name: str, found: Mapping[str, Any], plan: Planned, figures: Mapping[str, Any]) -> str:
    """One line of the table."""
    seconds = median(found["seconds"])
    utilized, memory = plan.flops / seconds, found["peak_memory"]
    published = f" ({utilized / figures['published']:.1%} of the datasheet's)" if figures["published"] else ""
    line = (
        f"{name:52} {1000 * seconds:8.2f} ms  {found['tokens'] / seconds:9,.0f} tokens/s  "
        f"MFU {utilized / figures['matmul']:.1%}{published}  "
        f"{memory / 2**30:.2f} GiB (plan {plan.memory / 2**30:.2f}: {memory / plan.memory - 1:+.1%})  "
        f"loss {found['losses'][-1]:.4f}  first {WARM_UP} steps {found['warm_up_seconds']:.0f} s"
    )
    if "not measured" in found:
        line += f"\n    {found['not measured']}"
    if "checkpoint" in found:
        own = found["checkpoint"]
        line += f"\n    checkpoint of {own['bytes'] / 1e9:.1f} GB: stall {own['later']:.2f} s, first {own['first']:.2f}"
    return line


@click.command()
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Measured in each of three blocks.")
@click.option("--only", default="", help="Cases whose name has this in it.")
@click.option("--profile", "profile_file", type=click.Path(path_type=Path), help="Write the profiler's tables to this.")
@click.option("--profile-only", default="", help="Of the cases whose name has this in it.")
@click.option("--tests", is_flag=True, help="Then run tests/gpu, until nine minutes have passed in all.")
@click.option("--dry-run", "dry", is_flag=True, help="All of it in a small size on the CPU.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(
    steps: int, only: str, profile_file: Path | None, profile_only: str, tests: bool, dry: bool, file: Path | None
) -> None:
    """Measure training on one GPU."""
    began = time.monotonic()
    if not dry and not torch.cuda.is_available():
        raise click.UsageError("torch finds no usable GPU; --dry-run does all of it in a small size on the CPU")
    chosen = _chosen("--only", only, cases())
    if profile_file is not None:
        _chosen("--profile-only", profile_only, chosen)
    for option, path in (("--json", file), ("--profile", profile_file)):
        _check_writable(option, path)
    with ProcessPoolExecutor(1 if dry else 8, get_context("spawn")) as pool:  # beside the first measurement
        plans = {case.name: pool.submit(planned, case, dry=dry) for case in chosen}
        figures = _measure_all(chosen, plans, steps, profile_file, profile_only, dry=dry, file=file)
    goals = judge(figures)
    if tests:
        goals.append(run_tests(max(1.0, MOST_SECONDS - (time.monotonic() - began))))
    if dry:
        goals = []  # a CPU reaches none
    write_figures(file, {**figures, "goals": [goal._asdict() for goal in goals]})
    for goal in goals:
        click.echo(goal)
    failed = any({"failed", "not measured"} & found.keys() for found in figures.values() if isinstance(found, dict))
    sys.exit(failed or not all(goal.reached for goal in goals))


def _chosen(option: str, part: str, among: Sequence[Case]) -> list[Case]:
    """Those whose name has this in it. Raises `UsageError` if there are none."""
    found = [case for case in among if part in case.name]
    if not found:
        raise click.UsageError(f"{option} {part}: in no name of {'; '.join(case.name for case in among)}")
    return found


def _check_writable(option: str, file: Path | None) -> None:
    """Raise `UsageError` now, before anything is measured."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise click.UsageError(f"{option} {file}: cannot be written: {error.strerror}") from None


def _measure_all(
    chosen: Sequence[Case],
    plans: Mapping[str, "Future[Planned]"],
    steps: int,
    profile_file: Path | None,
    profile_only: str,
    *,
    dry: bool,
    file: Path | None,
) -> dict[str, Any]:
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    precision = "fp32" if dry else "bf16"
    measured, published = measure_device(device), device_peak(device, precision)
    figures: dict[str, Any] = {
        "device": device_name(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "matmul": measured.fastest_matmul(precision)[1],
        "bandwidth": measured.memory_bandwidth,
        "published": published and published.rate,
    }
    rates = f"{figures['matmul'] / 1e12:.3g} TFLOP/s in {precision}, {figures['bandwidth'] / 1e12:.2g} TB/s"
    click.echo(f"{figures['device']}, torch {torch.__version__}, CUDA {torch.version.cuda}: {rates}")
    tables: list[str] = []
    for case in chosen:
        profiles = profile_file is not None and profile_only in case.name
        try:
            found = measure(case, device, steps, tables if profiles else None, dry=dry)
        except Exception as error:  # the other rows are still of use
            click.echo(f"{case.name:52} failed: {type(error).__name__}: {error}")
            figures[case.name] = {"failed": str(error)}
        else:
            plan, why = _plan_of(plans[case.name])
            figures[case.name] = {**found, **plan._asdict(), **why}
            click.echo(row(case.name, found, plan, figures))
        write_figures(file, figures)
        if profile_file is not None:
            profile_file.write_text("\n\n".join(tables), encoding="utf-8")
        with suppress(RuntimeError):  # after some errors the device takes nothing more
            release(device)
    return figures


def _driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _plan_of(found: "Future[Planned]") -> tuple[Planned, dict[str, str]]:
    """What was planned, or no numbers and the reason."""
    try:
        return found.result(), {}
    except Exception as error:
        return Planned(math.nan, math.nan), {"no plan": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
