"""Training with our Horovod and with Horovod as published: `python -m benchmarks.wake_up_training FOLDER`.

Two loads that wait for Horovod more than others: small steps (the preset shakespeare-char's model), and two ranks that
share each matrix. FOLDER: `pip install --no-deps --target FOLDER horovod-0.28.1-….whl`.
"""

from pathlib import Path

import click

from benchmarks.command_line import measured, measuring, write_figures
from benchmarks.launching import horovod
from benchmarks.paired import Options, Target, as_json, table
from benchmarks.tensor_parallel import SHARED
from benchmarks.workload import SMALL

LOADS = {"small steps": SMALL, "tensor parallel": SHARED}
BACKENDS = ("gloo", "mpi")


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
        result = measured(contestants, Options(rounds, steps, warmup))
        click.echo(table(result, targets) + "\n")
        figures[load] = as_json(result, targets)
    write_figures(file, figures)


if __name__ == "__main__":
    main()
