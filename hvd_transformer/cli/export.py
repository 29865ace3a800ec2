"""`hvd-transformer export`: writes the parts of a checkpoint that inference needs."""

from pathlib import Path

import click

from hvd_transformer.cli import options

# Those of `inference.export.FORMATS`, which imports torch.
FORMATS = ("native", "transformers", "ctranslate2", "gguf")


@click.command()
@options.checkpoint
@click.argument("folder", type=options.PATH)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="native",
    show_default=True,
    help="native: for this program. transformers: a language model as Llama, Qwen3, GPT-NeoX or GPT-2, for "
    "AutoModelForCausalLM. ctranslate2: a translation model. gguf: a Llama for llama.cpp.",
)
def export(checkpoint: Path, folder: Path, form: str) -> None:
    """Export the model of CHECKPOINT to FOLDER: its weights, tokenizers and configuration.

    `generate`, `translate` and `classify` accept the exported folder like a checkpoint, if its format is native or
    transformers.
    """
    options.check_checkpoint(checkpoint)
    from hvd_transformer.inference.export import export as export_model

    if said := export_model(checkpoint, folder, form):
        click.echo(said, err=True)
    click.echo(folder)
