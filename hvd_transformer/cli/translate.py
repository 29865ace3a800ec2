"""`hvd-transformer translate`: translates lines of text."""

import itertools
from collections.abc import Sequence
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
    from hvd_transformer.inference.predict import in_batches, translate_texts

    given = {"beam": beam, "length_penalty": length_penalty}
    settings = trained.translation.model_copy(update={key: value for key, value in given.items() if value is not None})
    longest, numbers = trained.num_positions, itertools.count(1)

    def encode(lines: Sequence[str]) -> list[Ids]:
        encoded = trained.tokenizers["source"].encode_lines(lines)
        for own, number in zip(encoded, numbers, strict=False):
            if len(own) > longest:
                key = "" if trained.config.pretrained else "model.max_length="
                place = options.place_of(file, number)
                raise UserError(f"{place}: {len(own)} tokens; the model has {key}{longest} positions")
        return encoded

    def work(sources: list[Ids]) -> list[str]:
        return translate_texts(
            trained.model, longest, trained.tokenizers["target"], sources, settings, trained.target_length
        )

    for _, text in in_batches(options.lines_of(file), encode, work, batch_size, **options.window(file)):
        click.echo((text or "").replace("\r", " ").replace("\n", " "))  # byte pairs may write line ends
