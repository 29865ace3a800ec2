"""The optimizer shared by the replicas: ours in both ways and unshared, and torch's ZeroRedundancyOptimizer with DDP.

    python -m benchmarks.sharded

Tokens a second of 2 ranks on this machine, one thread each; see `benchmarks.workload` for what they train and
`benchmarks.settings` for what all get. torch's are measured in several variants, and the best counts.
"""

from pathlib import Path

import click

from benchmarks.command_line import measuring, run
from benchmarks.launching import horovod, torchrun
from benchmarks.paired import Options, Target
from benchmarks.settings import Peer

NONE, STATE, GRADIENTS = "unshared, gloo", "state, gloo", "gradients, gloo"
NONE_MPI, STATE_MPI, GRADIENTS_MPI = "unshared, MPI", "state, MPI", "gradients, MPI"
# DistributedDataParallel's buckets: torch's default, and ours.
ZERO = {f"ZeRO + DDP, {peer}": peer for peer in (Peer(), Peer(bucket_mb=8), Peer(plain=True))}
TARGETS = (
    *(Target([name], list(ZERO), 1.02) for name in (STATE, STATE_MPI, GRADIENTS, GRADIENTS_MPI)),
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
    ours = [
        horovod(name, backend, f"parallel.optimizer_shard={way}")
        for way, names in ways.items()
        for backend, name in zip(("gloo", "mpi"), names, strict=True)
    ]
    peers = [torchrun(name, "zero", peer=peer) for name, peer in ZERO.items()]
    run([*ours, *peers], TARGETS, Options(rounds, steps, warmup), file)


if __name__ == "__main__":
    main()
