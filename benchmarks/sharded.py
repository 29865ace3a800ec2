"""The optimizer shared by the replicas: ours in both ways and unshared, and torch's ZeroRedundancyOptimizer with DDP.

Tokens a second of 2 ranks on this machine, one thread each; see `benchmarks.workload` for what they train.
"""

from pathlib import Path

import click

from benchmarks.data_parallel import horovod, measuring, run, torchrun
from benchmarks.paired import Options, Target

NONE, STATE, GRADIENTS = "unshared, gloo", "state, gloo", "gradients, gloo"
NONE_MPI, STATE_MPI, GRADIENTS_MPI = "unshared, MPI", "state, MPI", "gradients, MPI"
ZERO = "torch ZeRO + DDP, gloo"
TARGETS = (
    Target([STATE], ZERO, 1.0),
    Target([STATE_MPI], ZERO, 1.0),
    Target([GRADIENTS], ZERO, 1.0),
    Target([GRADIENTS_MPI], ZERO, 1.0),
    Target([STATE], NONE, 0.9),
    Target([GRADIENTS], NONE, 0.9),
    Target([STATE_MPI], NONE_MPI, 0.9),
    Target([GRADIENTS_MPI], NONE_MPI, 0.9),
)


@click.command()
@measuring
def main(rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure the step with and without a shared optimizer, and torch's own."""
    ways = {"none": (NONE, NONE_MPI), "state": (STATE, STATE_MPI), "gradients": (GRADIENTS, GRADIENTS_MPI)}
    contestants = [
        horovod(name, backend, f"parallel.optimizer_shard={way}")
        for way, names in ways.items()
        for backend, name in zip(("gloo", "mpi"), names, strict=True)
    ]
    run([*contestants, torchrun(ZERO, "zero")], TARGETS, Options(rounds, steps, warmup), file)


if __name__ == "__main__":
    main()
