"""`hvd-transformer prepare`: writes a data source's token files, alone or on every rank of an mpirun."""

import time
from pathlib import Path

import click

from hvd_transformer.cli import options


@click.command()
@options.config_file
@options.preset
@options.settings
def prepare(file: Path | None, preset: str | None, settings: tuple[str, ...]) -> None:
    """Tokenize a data source ahead of training and write its token files.

    Takes the settings of hvd-train and uses task and data.*, for example
    `hvd-transformer prepare data.source=my-folder data.tokenizer=bpe`. Runs on data.workers processes, or on the ranks
    of `mpirun -np N hvd-transformer prepare …`. Token files that exist are kept.
    """
    from hvd_transformer.config import load

    started = time.monotonic()
    config = load(preset, file, settings)
    # Imported after the settings are checked: torch takes seconds.
    from hvd_transformer.comm.process_map import worker_map
    from hvd_transformer.tasks.registry import task_class
    from hvd_transformer.tasks.task import PrepareContext

    with worker_map(config.data.workers) as mapped:
        if mapped is None:  # this rank was a worker of rank 0
            return
        prepared = task_class(config).prepare(config, PrepareContext(mapped, click.echo))
    for line in prepared.report():
        click.echo(line)
    click.echo(f"seconds: {time.monotonic() - started:.1f}")
