"""Memory of a rank whose optimizer is shared with other replicas, against what `plan` says.

counted    the bytes of the optimizer's state, and of the gradients that last from step to step: 1/dp of the whole
peak       those and the weights, and how far the process's peak in some steps (VmHWM) lies above what it has between
           two steps; large blocks go back to the kernel when they are freed, so that this is what was alive
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.pipeline_memory import TOLERANCE, reset_peak, status
from benchmarks.settings import ENVIRONMENT
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.atomic import write_text
from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.comm.world import World
from hvd_transformer.data.sampler import Replica
from hvd_transformer.parallel.mesh import ParallelMesh, process_groups
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

_MIB = 2**20
STEPS = 3
# 31.6 million parameters in the blocks, 2 million in the embedding.
MODEL = (
    "model.num_layers=10", "model.d_model=512", "model.num_heads=8", "model.d_feedforward=2048",
    "data.vocab_size=4000", "training.batch_size=4", "data.sequence_length=64",
)  # fmt: skip
WAYS = {
    "none": (),
    "state": ("parallel.optimizer_shard=state",),
    "gradients": ("parallel.optimizer_shard=gradients",),
    "gradients, pipeline of 2, recompute": (
        "parallel.optimizer_shard=gradients", "parallel.pipeline=2", "parallel.micro_batches=4",
        "parallel.recompute=always",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    way: str
    state: int
    gradients: int
    peak: int
    planned: int

    @property
    def off(self) -> float:
        return self.peak / self.planned - 1


def measure(file: Path, settings: Sequence[str]) -> None:
    """One rank: some steps, and what it had."""
    config = make_config(settings)
    world = World.start(groups=process_groups(launched().size, config.parallel.tensor))
    layout = ParallelMesh.of(config, world)
    job = Trainer(config, world, layout, SyntheticTask(config, Replica(layout.dp_rank, layout.dp)), TrainState())
    plans = job.steps()
    job.step(next(plans))  # imports what it needs
    between = reset_peak()
    for _ in range(STEPS):
        job.step(next(plans))
    above = status("VmHWM") - between
    found = {
        "gradients": sum(bucket.gradients.nbytes for bucket in job.engine.buffers),
        "state": sum(tensor.nbytes for state in job.engine.optimizer_state() for tensor in state.values()),
        "weights": sum(bucket.parameters.nbytes for bucket in job.engine.buffers),
    }
    found["peak"] = sum(found.values()) + above
    file.with_name(f"{file.name}-{world.rank}").write_text(json.dumps(found), encoding="utf-8")
    job.engine.close()
    world.close()


def compare(way: str, ranks: int, settings: Sequence[str]) -> Memory:
    """Starts the ranks; of each figure the rank with the most."""
    words = (*MODEL, *WAYS[way], *settings)
    environment = {**os.environ, **ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank"
        launch = ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", "--gloo", sys.executable]
        command = [*launch, "-m", "benchmarks.sharded_memory", "--one", str(file), *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = [json.loads(file.with_name(f"rank-{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    made = make_plan(make_config(words), None, ranks)
    planned = sum(sum(made.memory(stage)) for stage in made.stages)
    most = {key: max(rank[key] for rank in found) for key in ("state", "gradients", "peak")}
    return Memory(way, **most, planned=planned)


@click.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2))
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Only this one; may be repeated.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
@click.option("--one", type=click.Path(path_type=Path), hidden=True)
@click.argument("settings", nargs=-1)
def main(ranks: int, ways: tuple[str, ...], file: Path | None, one: Path | None, settings: tuple[str, ...]) -> None:
    """Measure ways of sharing; SETTINGS are more of the configuration."""
    if one is not None:
        measure(one, settings)
        return
    click.echo(f"{'optimizer_shard':<38}{'state':>8}{'gradients':>11}{'peak':>9}{'plan':>8}{'off':>7}   MiB a rank")
    memories = []
    for name in ways or WAYS:
        memories.append(own := compare(name, ranks, settings))
        mib = [number / _MIB for number in (own.state, own.gradients, own.peak, own.planned)]
        click.echo(f"{name:<38}{mib[0]:>8.1f}{mib[1]:>11.1f}{mib[2]:>9.1f}{mib[3]:>8.1f}{own.off:>+7.1%}")
    verdict = "MISSED" if any(abs(own.off) > TOLERANCE for own in memories) else "met"
    click.echo(f"wanted: within {TOLERANCE:.0%} of the plan: {verdict}; {ranks} ranks over gloo")
    if file is not None:
        write_text(file, json.dumps([asdict(own) for own in memories], indent=1) + "\n")


if __name__ == "__main__":
    main()
