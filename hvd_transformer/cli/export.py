"""`hvd-transformer export`: what is needed to use a trained model, and no more."""

from pathlib import Path

import click

from hvd_transformer.cli import options


@click.command()
@options.checkpoint
@click.argument("folder", type=click.Path(path_type=Path))
def export(checkpoint: Path, folder: Path) -> None:
    """Write the model of CHECKPOINT into FOLDER: model.safetensors, its tokenizers, and config.json.

    `generate`, `translate` and `classify` take it like a checkpoint.
    """
    options.check_checkpoint(checkpoint)
    from hvd_transformer.inference.trained_model import export as export_model

    export_model(checkpoint, folder)
    click.echo(folder)
