"""Training on one GPU: model FLOPs utilization (MFU), memory beside `plan`, pipelines on one card, checkpoints.

    python -m benchmarks.gpu --json benchmarks/results/gpu.json --profile gpu-profile.txt

MFU is relative to the fastest dense matrix product that this card showed in the same run. `--dry-run` does all of it in
a small size on the CPU.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.command_line import write_figures
from hvd_transformer.bench.device import measure_device
from hvd_transformer.bench.synthetic_task import SyntheticTask
from hvd_transformer.bench.timing import synchronize
from hvd_transformer.comm.world import World
from hvd_transformer.config import Config, load
from hvd_transformer.data.sampler import Replica, StepPlan
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.device_peak import device_name, device_peak
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.planning.model_costs import fake_model, layer_costs
from hvd_transformer.training.job_setup import compile_layers, initial_weights
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

VOCABULARY = 32_768
TUTORIAL_WORDS = 28_783  # of WikiText-2

# Random tokens teach nothing: a low rate keeps the loss finite.
COMMON = ("training.precision=bf16", "optimizer.lr=1e-6", "parallel.partition=uniform")
TUTORIAL = ("tutorial-1b", "parallel.pipeline=1", "parallel.micro_batches=1", "optimizer.warmup_steps=0")
# For the CPU, which compiles in fp32 only.
SMALL = (
    "model.num_layers=2",
    "model.d_model=64",
    "model.num_heads=8",
    "model.d_feedforward=64",
    "training.precision=fp32",
)


@dataclass(frozen=True)
class Case:
    """One row: a preset with settings, `stages` on the card, each with streams of its own."""

    name: str
    preset: str
    settings: Sequence[str]
    vocab_size: int = VOCABULARY
    stages: int = 1
    dry: Sequence[str] = ()  # smaller, for the CPU


def _both(name: str, preset: str, settings: Sequence[str], **more: Any) -> list[Case]:
    return [
        Case(f"{name}, {way}", preset, [*settings, f"training.compile={choice}"], **more)
        for way, choice in (("eager", "false"), ("compiled", "true"))
    ]


def cases() -> list[Case]:
    """The rows, in order."""
    preset, *tutorial = TUTORIAL
    few = {"dry": ["training.batch_size=4"]}
    llama = ["parallel.recompute=never"]
    of_tutorial: dict[str, Any] = {"vocab_size": TUTORIAL_WORDS, **few}
    return [
        *_both("llama-1b, 8k tokens", "llama-1b", [*llama, "training.batch_size=4"], **few),
        *_both("llama-1b, 16k tokens", "llama-1b", [*llama, "training.batch_size=8"], **few),
        *_both("tutorial-1b, 8k tokens", preset, [*tutorial, "training.batch_size=234"], **of_tutorial),
        *_both("tutorial-1b, 16k tokens", preset, [*tutorial, "training.batch_size=468"], **of_tutorial),
        *_both("gpt-small, 16k tokens", "gpt-small", ["training.batch_size=16"], **few),
        *(
            Case(
                f"tutorial-1b, 16k tokens, {stages} stages",
                preset,
                [*tutorial[2:], "training.batch_size=468", "parallel.micro_batches=4", f"parallel.pipeline={stages}"],
                stages=stages,
                **of_tutorial,
            )
            for stages in (1, 2, 4)
        ),
    ]


@contextmanager
def trainer(case: Case, device: torch.device, *, dry: bool) -> Iterator[Trainer]:
    """On random tokens, with random weights."""
    config = load(case.preset, overrides=[*COMMON, *case.settings, *([*SMALL, *case.dry] if dry else [])])
    world = World()
    mesh = ParallelMesh.of(config, world, (device,) * case.stages)
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
    why = compile_layers(config, task, mesh, world)
    if why is not None:
        raise RuntimeError(why)
    try:
        yield made
    finally:
        made.close()


def flops_per_step(config: Config, vocab_size: int) -> float:
    """Of forward and backward, without recomputing."""
    with fake_model(config, vocab_size, 1) as model:
        return config.training.batch_size * sum(
            layer.forward_flops + layer.backward_flops for layer in layer_costs(model)
        )


def measure(case: Case, device: torch.device, num_steps: int, tables: list[str] | None, *, dry: bool) -> dict[str, Any]:
    """Steps of one case: seconds, MFU's FLOPs, memory. Adds the profiler's table to `tables`."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with trainer(case, device, dry=dry) as job:
        config, plans = job.config, job.task.sampler.epoch()
        began = time.perf_counter()
        losses = [job.step(next(plans)).totals.loss for _ in range(3)]  # compiles and chooses kernels
        synchronize(device)
        warm_up = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(num_steps):
                job.step(next(plans))
            synchronize(device)
            seconds.append((time.perf_counter() - began) / num_steps)
        peak_memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        if tables is not None:
            tables.append(f"{case.name}\n{profiled(job, next(plans))}")
        plan = make_plan(config, case.vocab_size, 1)
        planned = sum(sum(plan.memory(stage)) for stage in plan.stages)
        tokens = config.training.batch_size * config.data.sequence_length
        return {
            "seconds": seconds,
            "tokens": tokens,
            "flops": flops_per_step(config, case.vocab_size),
            "losses": losses,
            "warm_up_seconds": warm_up,
            "peak_memory": peak_memory,
            "memory_before": before,
            "planned_memory": planned,
            "parameters": job.engine.num_parameters,
        }


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


def row(name: str, found: Mapping[str, Any], peak: float) -> str:
    """One line of the table."""
    seconds = median(found["seconds"])
    memory, planned = found["peak_memory"] / 2**30, found["planned_memory"] / 2**30
    return (
        f"{name:40} {1000 * seconds:9.2f} ms {found['tokens'] / seconds:12,.0f} tokens/s "
        f"MFU {100 * found['flops'] / seconds / peak:5.1f} %  {memory:6.2f} GiB (plan {planned:6.2f})  "
        f"before {found['memory_before'] / 2**30:.2f}  loss {found['losses'][-1]:.5f}  "
        f"first steps {found['warm_up_seconds']:.0f} s"
    )


@click.command()
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Measured in each of three blocks.")
@click.option("--only", default="", help="Cases whose name has this in it.")
@click.option("--profile", "profile_file", type=click.Path(path_type=Path), help="Write the profiler's tables to this.")
@click.option("--profile-only", default="llama-1b, 8k", help="Of the cases whose name has this in it.")
@click.option("--dry-run", "dry", is_flag=True, help="All of it in a small size on the CPU.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(steps: int, only: str, profile_file: Path | None, profile_only: str, dry: bool, file: Path | None) -> None:
    """Measure training on one GPU."""
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    measured = measure_device(device)
    _, peak = measured.fastest_matmul("bf16")
    published = device_peak(device, "bf16")
    figures: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "matmul": peak,
        "bandwidth": measured.memory_bandwidth,
        "published": published and published.rate,
    }
    click.echo(f"{figures['device']}, torch {torch.__version__}: bf16 {peak / 1e12:.0f} TFLOP/s, {published}")
    tables: list[str] = []
    for case in cases():
        if only not in case.name:
            continue
        profiles = profile_file is not None and profile_only in case.name
        try:
            found = measure(case, device, steps, tables if profiles else None, dry=dry)
        except Exception as error:  # the other rows are still of use
            click.echo(f"{case.name:40} failed: {type(error).__name__}: {error}")
            figures[case.name] = {"failed": str(error)}
        else:
            figures[case.name] = found
            click.echo(row(case.name, found, peak))
        release(device)
        if profile_file is not None:
            profile_file.write_text("\n\n".join(tables), encoding="utf-8")
        write_figures(file, figures)


if __name__ == "__main__":
    main()
