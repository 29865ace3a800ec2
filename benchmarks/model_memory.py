"""Memory of a rank while it builds a model, against what it holds afterwards; and the seconds that this takes.

own        the bytes of its weights, gradients and optimizer state once they are there
held       the anonymous memory that building added to that of a rank with a tiny model (Anonymous in smaps_rollup)
peak       how far its memory rose meanwhile above that of the rank with the tiny model (VmHWM)

Blocks that are freed go back to the kernel at once, as in `benchmarks.sharded_memory`: what glibc keeps of them in its
heap depends on where small blocks happen to lie, and differs from run to run by a tenth of all.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.pipeline_memory import TOLERANCE, reset_peak, status
from benchmarks.settings import ENVIRONMENT
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.atomic import write_text
from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.comm.world import World
from hvd_transformer.config import Config
from hvd_transformer.data.sampler import Replica
from hvd_transformer.parallel.mesh import ParallelMesh, process_groups
from hvd_transformer.parallel.replica_check import broadcast_parameters
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

_MIB = 2**20
# 12 blocks of 12,596,224 weights, the tied embedding's 49,000 × 1,024 and a final norm: 201,332,736.
MODEL = (
    "model.num_layers=12", "model.d_model=1024", "model.num_heads=8", "model.d_feedforward=4096",
    "data.vocab_size=49000",
)  # fmt: skip
TINY = ("model.num_layers=1", "model.d_model=8", "model.num_heads=8", "model.d_feedforward=8", "data.vocab_size=257")


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise LookupError("Anonymous")


def build(config: Config, world: World, layout: ParallelMesh) -> Trainer:
    """What `training.train_job` does for a new run, less its files."""
    task = SyntheticTask(config, Replica(layout.dp_rank, layout.dp))
    job = Trainer(config, world, layout, task, TrainState())
    broadcast_parameters(job.engine.buffers, layout.dp_group)
    return job


def measure(file: Path, settings: Sequence[str]) -> None:
    """One rank."""
    config, tiny = make_config([*MODEL, *settings]), make_config([*MODEL, *settings, *TINY])
    world = World.start(groups=process_groups(launched().size, config.parallel.tensor))
    layout = ParallelMesh.of(config, world)
    build(tiny, world, layout).engine.close()
    gc.collect()
    world.barrier()
    anonymous_before, before, began = anonymous(), reset_peak(), time.perf_counter()
    job = build(config, world, layout)
    seconds = time.perf_counter() - began
    own = [tensor for buffer in job.engine.buffers for tensor in (buffer.parameters, buffer.gradients)]
    own += [tensor for state in job.engine.optimizer_state() for tensor in state.values()]
    found = {
        "own": sum(tensor.nbytes for tensor in own),
        "held": anonymous() - anonymous_before,
        "peak": status("VmHWM") - before,
        "seconds": seconds,
    }
    file.with_name(f"{file.name}-{world.rank}").write_text(json.dumps(found), encoding="utf-8")
    world.barrier()
    job.close()
    world.close()


def run(ranks: int, settings: Sequence[str]) -> list[dict[str, float]]:
    """Starts the ranks; what each of them found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank"
        launch = ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", "--gloo"] if ranks > 1 else []
        command = [*launch, sys.executable, "-m", "benchmarks.model_memory", "--one", str(file), *settings]
        environment = {**os.environ, **ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(file.with_name(f"rank-{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]


@click.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
@click.option("--one", type=click.Path(path_type=Path), hidden=True)
@click.argument("settings", nargs=-1)
def main(ranks: int, file: Path | None, one: Path | None, settings: tuple[str, ...]) -> None:
    """Measure the building of a model of 201 million parameters; SETTINGS are more of the configuration."""
    if one is not None:
        measure(one, settings)
        return
    found = run(ranks, settings)
    click.echo(f"{'rank':<6}{'own':>9}{'held':>9}{'peak':>9}{'peak / own':>12}   MiB{'seconds':>10}")
    for rank, each in enumerate(found):
        own, held, peak = (each[key] / _MIB for key in ("own", "held", "peak"))
        click.echo(f"{rank:<6}{own:>9.1f}{held:>9.1f}{peak:>9.1f}{peak / own:>12.3f}{each['seconds']:>16.1f}")
    missed = any(each["peak"] > (1 + TOLERANCE) * each["own"] for each in found)
    click.echo(f"wanted: peak at most {TOLERANCE:.0%} above own: {'MISSED' if missed else 'met'}; {ranks} ranks")
    if file is not None:
        write_text(file, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
