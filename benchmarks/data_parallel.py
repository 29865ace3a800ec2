"""Data parallel training: ours over gloo and over MPI, torch DistributedDataParallel, and no communication at all.

Tokens a second of 2 ranks on this machine, one thread each; see `benchmarks.workload` for what they train.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.group import Contestant, ContestantFailed
from benchmarks.paired import Options, Target, as_json, measure, table
from hvd_transformer.atomic import write_text

RANKS = 2
GLOO, MPI, DDP, LIMIT = "ours over gloo", "ours over MPI", "torch DDP over gloo", "no communication"
TARGETS = (
    Target([GLOO], DDP, 1.00),
    Target([MPI], DDP, 1.05),
    Target([GLOO, MPI], LIMIT, 0.93),
)
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def contestants() -> list[Contestant]:
    """The four, each of as many processes."""
    return [
        horovod(GLOO, "gloo"),
        horovod(MPI, "mpi"),
        torchrun(DDP, "ddp"),
        Contestant(LIMIT, [worker("trainer")] * RANKS, RANKS, ENVIRONMENT),
    ]


def worker(kind: str, *settings: str) -> list[str]:
    """The command of one rank."""
    return [sys.executable, "-m", "benchmarks.contestants", kind, "SOCKET", *settings]


def horovod(name: str, backend: str, *settings: str, **environment: str) -> Contestant:
    """Ours under horovodrun, with the package's defaults but for KEY=VALUE settings and variables."""
    launcher = ["horovodrun", "-np", str(RANKS), "-H", f"localhost:{RANKS}", f"--{backend}"]
    return Contestant(name, [[*launcher, *worker("trainer", *settings)]], RANKS, {**ENVIRONMENT, **environment})


def torchrun(name: str, kind: str, *settings: str) -> Contestant:
    """A contestant of torch's own tools under torchrun, all on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = ["torchrun", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1", "--master-port", port]
    # torchrun puts Python before the words itself.
    return Contestant(
        name, [[*launcher, *worker(kind, *settings)[1:]]], RANKS, {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
    )


def measuring(command: Callable[..., None]) -> Callable[..., None]:
    """A benchmark's options: `rounds`, `steps`, `warmup` and `file`."""
    for option in reversed(
        [
            click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Blocks of each."),
            click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Measured a block."),
            click.option("--warmup", default=2, show_default=True, type=click.IntRange(0), help="Before, unmeasured."),
            click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too."),
        ]
    ):
        command = option(command)
    return command


def run(
    names: Sequence[Contestant],
    targets: Sequence[Target],
    options: Options,
    file: Path | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Measures, prints the table, writes every figure and `more` to the file; ends the process where one failed."""
    try:
        result = measure(names, options, lambda line: click.echo(line, err=True))
    except ContestantFailed as error:
        click.echo(f"benchmark: {error}", err=True)
        sys.exit(1)
    click.echo(table(result, targets))
    if file is not None:
        write_text(file, json.dumps({**as_json(result, targets), **(more or {})}, indent=1) + "\n")


@click.command()
@measuring
def main(rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure data-parallel training against torch DistributedDataParallel and against no communication."""
    run(contestants(), TARGETS, Options(rounds, steps, warmup), file)


if __name__ == "__main__":
    main()
