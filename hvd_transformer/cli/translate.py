"""`hvd-transformer translate`: translates lines of text."""

from pathlib import Path

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError


@click.command()
@options.checkpoint
@options.text_file
@click.option("--beam", type=click.IntRange(1), help="Beam size; 1: greedy search. Default: as in training.")
@click.option(
    "--length-penalty",
    type=options.FiniteRange(0, 10),
    help="Values above 0 favour longer translations. Default: as in training.",
)
@options.batch_size
@options.device
def translate(
    checkpoint: Path, file: Path | None, beam: int | None, length_penalty: float | None, batch_size: int, device: str
) -> None:
    """Translate each line of FILE or standard input with CHECKPOINT: a checkpoint, run directory or exported folder.

    Prints one line per input line, in order; an empty line stays empty.
    """
    trained = options.load_model(checkpoint, "translation", device)
    from hvd_transformer.data.tokenizers import Ids
    from hvd_transformer.inference.predict import in_batches
    from hvd_transformer.inference.predict import translate as translate_batch
    from hvd_transformer.models.encoder_decoder import EncoderDecoder

    model, settings, longest = trained.model, trained.translation, trained.config.max_length
    assert isinstance(model, EncoderDecoder)

    def work(sources: list[Ids]) -> list[str]:
        if len(sources[-1]) > longest:
            raise UserError(f"a line of {len(sources[-1])} tokens; the model has model.max_length={longest} positions")
        penalty = settings.length_penalty if length_penalty is None else length_penalty
        found = translate_batch(
            model, sources, longest, trained.target_length, beam=beam or settings.beam, length_penalty=penalty
        )
        return [trained.tokenizers["target"].decode_line(best[0].tokens) for best in found]

    encode = trained.tokenizers["source"].encode_lines
    for _, text in in_batches(options.lines_of(file), encode, work, batch_size, **options.window(file)):
        click.echo(text or "")
