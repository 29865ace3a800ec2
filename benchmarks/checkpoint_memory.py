"""Anonymous memory of each rank while a model is built, saved and loaded, under `parallel.tensor=2` with shards.

    python -m benchmarks.checkpoint_memory                      # 200 M parameters, 2 ranks
    python -m benchmarks.checkpoint_memory --ranks 4

A rank's own part is its weights, gradients and optimizer state. Peaks are of `Anonymous` in /proc/self/smaps_rollup,
sampled by a thread, above what the process had before it built the model; a tiny model was built, saved and loaded in
it first. Freed blocks go back to the kernel at once, so that this is what was alive.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.model_memory import MODEL, TINY, anonymous
from benchmarks.settings import ENVIRONMENT
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.checkpoint.capture import Capture
from hvd_transformer.checkpoint.store import CheckpointStore
from hvd_transformer.checkpoint.writer import Saver
from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.comm.world import World
from hvd_transformer.config import Config
from hvd_transformer.data.sampler import Replica
from hvd_transformer.parallel.mesh import ParallelMesh, process_groups
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

SETTINGS = (*MODEL, "data.sequence_length=16", "training.batch_size=1")
LAYOUT = ("parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.optimizer_shard=state")
_MIB = 2**20
# What building and loading may take beside the rank's own part, and saving beside that and a copy of what it writes.
BESIDE, EXTRA = 0.15, 64 * _MIB
_PAUSE = 0.01


def peak(action: Callable[[], Any]) -> tuple[Any, int]:
    """The action's result, and the most memory while it ran."""
    most, done = anonymous(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(_PAUSE):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = action()
    finally:
        done.set()
        thread.join()
    return result, max(most, anonymous())


def of_rank(world: World, mesh: ParallelMesh, config: Config, folder: Path) -> dict[str, int]:
    """Builds, saves and loads on one rank."""
    before = anonymous()

    def build() -> Trainer:
        return Trainer(config, world, mesh, SyntheticTask(config, Replica(mesh.dp_rank, mesh.dp)), TrainState())

    job, built = peak(build)
    store, written = CheckpointStore(folder, keep_last=1), 0
    saver = Saver(store, world, _give_up)

    def save() -> None:
        nonlocal written
        begun = saver.begin(1)
        assert begun is not None
        taken = Capture(job.engine, begun.writers).take(1, {}, {}, best=False)  # a job would keep this memory
        written = sum(block.nbytes for part in taken.parts.values() for _, block in part.blocks)
        saver.save(taken, begun)
        del taken
        saver.close()

    _, saved = peak(save)
    world.barrier()
    _, loaded = peak(
        lambda: job.restore(store.steps()[-1] if world.rank == 0 else None, {"loss_scaler": job.loss_scaler.state()})
    )
    buffers = job.engine.buffers
    own = sum(buffer.parameters.nbytes + buffer.gradients.nbytes for buffer in buffers)
    own += sum(tensor.nbytes for state in job.engine.optimizer_state() for tensor in state.values())
    job.engine.close()
    return {
        "parameters": job.engine.num_parameters, "own": own, "written": written,
        "built": built - before, "saved": saved - before, "loaded": loaded - before,
    }  # fmt: skip


def _give_up(message: str) -> None:
    raise SystemExit(message)


def measure(folder: Path, settings: Sequence[str]) -> None:
    """One rank."""
    world = World.start(groups=process_groups(launched().size, 2))
    mesh = ParallelMesh.of(make_config(LAYOUT), world)
    of_rank(world, mesh, make_config([*SETTINGS, *LAYOUT, *TINY]), folder / "tiny")
    found = of_rank(world, mesh, make_config([*SETTINGS, *LAYOUT, *settings]), folder / "run")
    (folder / f"rank-{world.rank}").write_text(json.dumps(found), encoding="utf-8")
    world.close()


@click.command()
@click.argument("settings", nargs=-1)
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--rank-of", "rank_of", type=click.Path(path_type=Path), hidden=True)
def main(settings: Sequence[str], ranks: int, rank_of: Path | None) -> None:
    """Exit code 1 where a rank takes more than it may."""
    if rank_of is not None:
        measure(rank_of, settings)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-memory-") as name:
        command = ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", "--gloo", sys.executable, "-m"]
        command += ["benchmarks.checkpoint_memory", "--rank-of", name, *settings]
        # Blocks above 64 KiB are mapped one by one, and unmapped when they are freed.
        environment = {**os.environ, **ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found = [json.loads((Path(name) / f"rank-{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    missed = False
    print(f"{found[0]['parameters']:,} parameters, {ranks} ranks, {' '.join(LAYOUT)}")
    for rank, of in enumerate(found):
        limits = {"built": (1 + BESIDE) * of["own"], "saved": of["own"] + of["written"] + EXTRA}
        limits["loaded"] = limits["built"]
        missed |= any(of[phase] > limit for phase, limit in limits.items())
        told = ", ".join(
            f"{phase} {of[phase] / _MIB:,.0f} (at most {limit / _MIB:,.0f}: {'MISSED' if of[phase] > limit else 'met'})"
            for phase, limit in limits.items()
        )
        print(f"rank {rank}, MiB: own part {of['own'] / _MIB:,.0f}, writes {of['written'] / _MIB:,.0f}; {told}")
    sys.exit(missed)


if __name__ == "__main__":
    main()
