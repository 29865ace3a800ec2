"""`hvd-transformer prepare`: writes a data source's token files, alone or with every rank of an mpirun."""

from pathlib import Path

import click


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Settings as YAML.")
@click.option("--preset", metavar="NAME", help="Settings that come with the package; `hvd-train --help` lists them.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
def prepare(file: Path | None, preset: str | None, settings: tuple[str, ...]) -> None:
    """Write a data source's token files, before a job needs them.

    Takes the same settings as hvd-train and uses data.*: for example
    `hvd-transformer prepare data.source=my-folder data.tokenizer=bpe`. Works over data.workers processes,
    or over the ranks of `mpirun -np N hvd-transformer prepare …`. What is already there is kept.
    """
    import time

    from hvd_transformer.comm.pool import worker_map
    from hvd_transformer.config import load
    from hvd_transformer.data.prepare import prepare as prepare_data

    started = time.monotonic()
    config = load(preset=preset, file=file, overrides=settings).data
    with worker_map(config.workers) as mapped:
        if mapped is None:  # another rank's worker
            return
        prepared = prepare_data(config, mapped, report=click.echo)
    click.echo(f"folder: {prepared.folder}")
    for split, tokens in prepared.splits.items():
        click.echo(f"{split}: {len(tokens):,} tokens")
    click.echo(f"vocabulary: {prepared.tokenizer.vocab_size:,} ({prepared.tokenizer.kind})")
    click.echo(f"seconds: {time.monotonic() - started:.1f}")
