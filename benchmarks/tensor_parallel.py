"""Tensor parallel training: two ranks that share the matrices, over MPI and over gloo, and one core that has them all.

Tokens a second of one model of width 512 on this machine, one thread a rank; see TENSOR in `benchmarks.workload`.
"""

from pathlib import Path

import click

from benchmarks.command_line import measuring, run
from benchmarks.group import Contestant
from benchmarks.launching import alone, horovod
from benchmarks.paired import Options, Target
from benchmarks.workload import TENSOR

MPI, GLOO, TORCH, ONE = "2 ranks over MPI", "2 ranks over gloo", "2 ranks, sums over torch's gloo", "one core"
SHARED = (*TENSOR, "parallel.tensor=2", "parallel.vocab_parallel=true")


def contestants() -> list[Contestant]:
    """All of them, with the same samples a step."""
    return [
        horovod(MPI, "mpi", *SHARED),
        horovod(GLOO, "gloo", *SHARED),
        horovod(TORCH, "gloo", *SHARED, "communication.tensor_backend=torch"),
        alone(ONE, "trainer", *TENSOR),
    ]


@click.command()
@measuring
def main(rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure two ranks that share a model's matrices against one core that has them all."""
    run(contestants(), [Target([MPI], ONE, 1.5), Target([GLOO], ONE, 1.5)], Options(rounds, steps, warmup), file)


if __name__ == "__main__":
    main()
