"""`hvd-transformer export`: writes the parts of a checkpoint that inference needs."""

from pathlib import Path

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError

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
@click.option("--merge", is_flag=True, help="LoRA: a Hugging Face folder of the whole model, adapters added.")
def export(checkpoint: Path, folder: Path, form: str, merge: bool) -> None:
    """Export the model of CHECKPOINT to FOLDER: its weights, tokenizers and configuration; with LoRA the adapters, as
    peft writes them.

    `generate`, `translate` and `classify` accept the exported folder like a checkpoint, if its format is native or
    transformers.
    """
    if merge and form != "native":
        raise UserError(f"--merge: not with --format {form}; it writes a folder that other programs' converters read")
    options.check_checkpoint(checkpoint)
    from hvd_transformer.inference.export import export as export_model

    if said := export_model(checkpoint, folder, form, merge=merge):
        click.echo(said, err=True)
    click.echo(folder)
