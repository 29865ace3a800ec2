"""`hvd-transformer prepare`: writes a data source's token files, alone or with every rank of an mpirun."""

from pathlib import Path

import click


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Settings as YAML.")
@click.option("--preset", metavar="NAME", help="Settings that come with the package; `hvd-train --help` lists them.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
def prepare(file: Path | None, preset: str | None, settings: tuple[str, ...]) -> None:
    """Write a data source's token files, before a job needs them.

    Takes the same settings as hvd-train and uses task and data.*: for example
    `hvd-transformer prepare data.source=my-folder data.tokenizer=bpe`. Works over data.workers processes,
    or over the ranks of `mpirun -np N hvd-transformer prepare …`. What is already there is kept.
    """
    import time

    from hvd_transformer.config import load

    started = time.monotonic()
    config = load(preset=preset, file=file, overrides=settings)
    # Not before what can be wrong without them: torch takes seconds.
    from hvd_transformer.comm.process_map import worker_map
    from hvd_transformer.data.build_once import never
    from hvd_transformer.tasks.registry import task_class
    from hvd_transformer.tasks.task import PrepareContext

    with worker_map(config.data.workers) as mapped:
        if mapped is None:  # another rank's worker
            return
        prepared = task_class(config).prepare(config, PrepareContext(mapped, click.echo, never))
    for line in prepared.report():
        click.echo(line)
    click.echo(f"seconds: {time.monotonic() - started:.1f}")
