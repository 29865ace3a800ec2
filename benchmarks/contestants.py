"""The processes that are measured: `python -m benchmarks.contestants KIND SOCKET [KEY=VALUE ...]`, one a rank.

trainer   the package's own `Trainer.step` over Horovod; started without a launcher, a world of one
plain     a loop of torch alone, one process
ddp       torch's DistributedDataParallel over gloo; started by torchrun
zero      the same with torch's ZeroRedundancyOptimizer
torch-…   torch's pipelines over gloo (`torch_pipelines`); started by torchrun
"""

import json
from collections.abc import Callable, Sequence
from functools import partial

import click

from benchmarks import torch_loops
from benchmarks.channel import Done, serve
from benchmarks.settings import Peer
from benchmarks.torch_pipelines import TORCH_PIPELINES, torch_pipeline
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.comm.world import World
from hvd_transformer.data.sampler import Replica
from hvd_transformer.parallel.mesh import ParallelMesh, process_groups
from hvd_transformer.parallel.replica_check import broadcast_parameters
from hvd_transformer.training.job_setup import compile_layers
from hvd_transformer.training.process import tune_memory
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer


def trainer(socket: str, settings: Sequence[str]) -> None:
    """Ours: what `training.train_job.run` assembles, less files and progress."""
    config = make_config(settings)
    world = World.start(groups=process_groups(launched().size, config.parallel.tensor))
    layout = ParallelMesh.of(config, world)
    task = SyntheticTask(config, Replica(layout.dp_rank, layout.dp))
    job = Trainer(config, world, layout, task, TrainState())
    broadcast_parameters(job.engine.buffers, layout.dp_group)
    if (why := compile_layers(config, task, layout, world)) is not None:
        raise SystemExit(f"training.compile: off, {why}")
    plans = job.steps()

    def step() -> Done:
        plan = next(plans)
        loss = job.step(plan).totals.loss
        tokens = sum(map(len, plan.accumulation)) * task.length // layout.tp  # its share of them
        return Done(tokens, loss, job.engine.grad_sync.wire.format)

    serve(socket, step)
    job.engine.check_replicas("after the benchmark")
    job.close()
    world.close()


# Of a socket, KEY=VALUE words, and what a peer may choose.
KINDS: dict[str, Callable[[str, Sequence[str], Peer], None]] = {
    "trainer": lambda socket, settings, _: trainer(socket, settings),
    "plain": torch_loops.plain,
    "ddp": torch_loops.ddp,
    "zero": partial(torch_loops.ddp, zero=True),
    **{kind: partial(torch_pipeline, kind=kind) for kind in TORCH_PIPELINES},
}


@click.command()
@click.option("--peer", default="{}", help="A `settings.Peer` as JSON.")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("socket")
@click.argument("settings", nargs=-1)
def main(peer: str, kind: str, socket: str, settings: tuple[str, ...]) -> None:
    """One rank of a contestant."""
    tune_memory()
    KINDS[kind](socket, settings, Peer(**json.loads(peer)))


if __name__ == "__main__":
    main()
