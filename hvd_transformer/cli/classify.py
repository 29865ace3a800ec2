"""`hvd-transformer classify`: classifies lines of text."""

import json
from pathlib import Path

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError


@click.command()
@options.checkpoint
@options.text_file
@click.option("--text", type=options.Text(), multiple=True, help="Text to label instead of a file; repeatable.")
@options.batch_size
@options.device
def classify(checkpoint: Path, file: Path | None, text: tuple[str, ...], batch_size: int, device: str) -> None:
    """Classify each line of FILE or standard input with CHECKPOINT: a checkpoint, run directory or exported folder.

    Prints one JSON object per line, in order: the text, its label and the probability of every label. The label of an
    empty text is null. A text that is longer than the training samples is truncated as they were.
    """
    if text and file is not None:
        raise UserError("--text and --file: give one of them")
    trained = options.load_model(checkpoint, "classification", device)
    from hvd_transformer.data.tokenizers import Ids
    from hvd_transformer.inference.predict import classify as classify_batch
    from hvd_transformer.inference.predict import in_batches

    tokenizer = trained.tokenizers["text"]

    def work(texts: list[Ids]) -> list[list[float]]:
        cut = [tokenizer.shorten(own, trained.longest) for own in texts]
        found: list[list[float]] = classify_batch(trained.model, cut, tokenizer.pad).tolist()
        return found

    lines = text or options.lines_of(file)
    for line, found in in_batches(lines, tokenizer.encode_lines, work, batch_size, **options.window(file)):
        every = {name: round(value, 6) for name, value in zip(trained.labels, found, strict=True)} if found else {}
        label = max(every, key=every.__getitem__) if every else None
        click.echo(json.dumps({"text": line, "label": label, "probabilities": every}, ensure_ascii=False))
