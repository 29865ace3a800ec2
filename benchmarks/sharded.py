"""The optimizer shared by the replicas: ours in both ways and unshared, and torch's ZeroRedundancyOptimizer with DDP.

    python -m benchmarks.sharded

Tokens a second of 2 ranks on this machine, one thread each; see `benchmarks.workload` for what they train and
`benchmarks.settings` for what all get. torch's are measured in several variants, and the best counts.
"""

from pathlib import Path

import click

from benchmarks.command_line import measuring, run
from benchmarks.group import Contestant
from benchmarks.launching import horovod, torchrun
from benchmarks.paired import Options, Target
from benchmarks.settings import Peer

NONE, STATE, GRADIENTS = "unshared, gloo", "state, gloo", "gradients, gloo"
NONE_MPI, STATE_MPI, GRADIENTS_MPI = "unshared, MPI", "state, MPI", "gradients, MPI"
COMPILED = ", training.compile"
# DistributedDataParallel's buckets: torch's default, and ours.
EAGER_ZERO, COMPILED_ZERO = (
    {f"ZeRO + DDP, {peer}": peer for peer in peers}
    for peers in ((Peer(), Peer(bucket_mb=8), Peer(plain=True)), (Peer(plain=True, compiled=True),))
)
ZERO = EAGER_ZERO | COMPILED_ZERO
SHARDED = (STATE, STATE_MPI, GRADIENTS, GRADIENTS_MPI)
TARGETS = (
    # Eager against eager, then each side with its compiler where that helps.
    *(Target([name], list(EAGER_ZERO), 1.02) for name in SHARDED),
    *(Target([name, name + COMPILED], list(ZERO), 1.02) for name in SHARDED),
    Target([STATE], NONE, 0.9),
    Target([GRADIENTS], NONE, 0.9),
    Target([STATE_MPI], NONE_MPI, 0.9),
    Target([GRADIENTS_MPI], NONE_MPI, 0.9),
)


def contestants() -> list[Contestant]:
    """Ours in every way over both backends, and torch's."""
    ways = {"none": (NONE, NONE_MPI), "state": (STATE, STATE_MPI), "gradients": (GRADIENTS, GRADIENTS_MPI)}
    ours = [
        horovod(name + more, backend, f"parallel.optimizer_shard={way}", *words)
        for way, names in ways.items()
        for backend, name in zip(("gloo", "mpi"), names, strict=True)
        for more, words in (("", ()), (COMPILED, ("training.compile=true",)))
        if name in SHARDED or not more
    ]
    return [*ours, *(torchrun(name, "zero", peer=peer) for name, peer in ZERO.items())]


@click.command()
@measuring
def main(rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure the step with and without a shared optimizer, and torch's own."""
    run(contestants(), TARGETS, Options(rounds, steps, warmup), file)


if __name__ == "__main__":
    main()
