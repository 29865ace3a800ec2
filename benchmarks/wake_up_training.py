"""Training with our Horovod and with Horovod as published: `python -m benchmarks.wake_up_training FOLDER`.

Two loads that wait for Horovod more than others: small steps (the preset shakespeare-char's model), and two ranks that
share each matrix. FOLDER: `pip install --no-deps --target FOLDER horovod-0.28.1-….whl`.
"""

import json
import sys
from pathlib import Path

import click

from benchmarks.data_parallel import horovod, measuring
from benchmarks.group import ContestantFailed
from benchmarks.paired import Options, Result, Target, as_json, measure, table
from benchmarks.tensor_parallel import SHARED
from benchmarks.workload import SMALL
from hvd_transformer.atomic import write_text

LOADS = {"small steps": SMALL, "tensor parallel": SHARED}
BACKENDS = ("gloo", "mpi")
LOSS_TOLERANCE = 1e-6


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@measuring
def main(folder: Path, rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure training with our Horovod against the one in FOLDER. Exit code 1 where the losses differ."""
    figures = {}
    for load, settings in LOADS.items():
        contestants = [
            contestant
            for backend in BACKENDS
            for contestant in (
                horovod(f"{load}, {backend}", backend, *settings),
                horovod(f"{load}, {backend}, published", backend, *settings, PYTHONPATH=str(folder.resolve())),
            )
        ]
        targets = [Target([name], f"{name}, published", 1.0) for name in (f"{load}, {backend}" for backend in BACKENDS)]
        try:
            result = measure(contestants, Options(rounds, steps, warmup), lambda line: click.echo(line, err=True))
        except ContestantFailed as error:
            click.echo(f"benchmark: {error}", err=True)
            sys.exit(1)
        click.echo(table(result, targets) + "\n")
        _check_losses(result)
        figures[load] = as_json(result, targets)
    if file is not None:
        write_text(file, json.dumps(figures, indent=1) + "\n")


def _check_losses(result: Result) -> None:
    for of_round in zip(*result.losses.values(), strict=True):
        if max(of_round) - min(of_round) > LOSS_TOLERANCE * max(of_round):
            click.echo(f"benchmark: the losses of one step differ: {result.losses}", err=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
