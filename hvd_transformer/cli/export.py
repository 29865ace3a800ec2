"""`hvd-transformer export`: writes the parts of a checkpoint that inference needs."""

from pathlib import Path

import click

from hvd_transformer.cli import options


@click.command()
@options.checkpoint
@click.argument("folder", type=options.PATH)
@click.option(
    "--format",
    "form",
    type=click.Choice(["native", "transformers"]),
    default="native",
    show_default=True,
    help="transformers: a language model as Llama, Qwen3, GPT-NeoX or GPT-2, for AutoModelForCausalLM.",
)
@click.option("--merge", is_flag=True, help="LoRA: a Hugging Face folder of the whole model, adapters added.")
def export(checkpoint: Path, folder: Path, form: str, merge: bool) -> None:
    """Export the model of CHECKPOINT to FOLDER: model.safetensors, its tokenizers and config.json; with LoRA the
    adapters, as peft writes them.

    `generate`, `translate` and `classify` accept the exported folder like a checkpoint.
    """
    options.check_checkpoint(checkpoint)
    from hvd_transformer.inference.export import export as export_model
    from hvd_transformer.inference.export import export_merged, export_transformers

    if merge:
        export_merged(checkpoint, folder)
    elif form == "transformers":
        click.echo(export_transformers(checkpoint, folder), err=True)
    else:
        export_model(checkpoint, folder)
    click.echo(folder)
