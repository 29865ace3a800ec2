"""`hvd-transformer export`: writes the parts of a checkpoint that inference needs."""

from pathlib import Path

import click

from hvd_transformer.cli import options


@click.command()
@options.checkpoint
@click.argument("folder", type=options.PATH)
def export(checkpoint: Path, folder: Path) -> None:
    """Export the model of CHECKPOINT to FOLDER: model.safetensors, its tokenizers and config.json.

    `generate`, `translate` and `classify` accept the exported folder like a checkpoint.
    """
    options.check_checkpoint(checkpoint)
    from hvd_transformer.inference.trained_model import export as export_model

    export_model(checkpoint, folder)
    click.echo(folder)
