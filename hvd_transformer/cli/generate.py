"""`hvd-transformer generate`: continues texts with a language model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.data.tokenizers import Tokenizer


@click.command()
@options.checkpoint
@click.option("--prompt", "prompts", type=options.Text(), multiple=True, help="Text to continue; repeatable.")
@click.option("--file", type=options.PATH, metavar="FILE", help="File with one prompt per line.")
@click.option("--tokens", type=click.IntRange(1), default=100, show_default=True, help="Tokens to generate per prompt.")
@click.option(
    "--temperature",
    type=options.FiniteRange(0),
    default=1.0,
    show_default=True,
    help="Sampling temperature; 0: greedy, always the most likely token.",
)
@click.option("--top-k", type=click.IntRange(1), help="Sample from the k most likely tokens.")
@click.option(
    "--top-p",
    type=options.FiniteRange(0, 1, min_open=True),
    help="Nucleus sampling: sample from the fewest tokens with this total probability.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of the sampling.")
@options.batch_size
@click.option("--chat", is_flag=True, help="Each prompt is a user's message, by the chat template; print the answers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
@options.device
def generate(
    checkpoint: Path,
    prompts: tuple[str, ...],
    file: Path | None,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    batch_size: int,
    chat: bool,
    as_json: bool,
    device: str,
) -> None:
    """Continue texts with CHECKPOINT: a language model's checkpoint, run directory or exported folder.

    A single prompt's text is streamed as it is generated. Several prompts are printed with their texts, in order, when
    those before are complete.
    """
    lines = list(options.lines_of(file)) if file else []
    texts, places = [*prompts, *lines], [f"--prompt {_shown(text)}" for text in prompts]
    places += [options.place_of(file, number) for number in range(1, len(lines) + 1)]
    if not texts:
        raise UserError("generate: give --prompt TEXT or --file FILE")
    trained = options.load_model(checkpoint, "language_model", device)
    from hvd_transformer.data.chat_template import end_tokens
    from hvd_transformer.inference.generation import Sampling, generate_in_batches
    from hvd_transformer.inference.generation import generate as generate_batch
    from hvd_transformer.inference.text_stream import TextStream

    tokenizer, longest = trained.tokenizers["text"], trained.num_positions
    rows = _as_messages(tokenizer, texts, checkpoint) if chat else [tokenizer.encode(text).tolist() for text in texts]
    for place, row in zip(places, rows, strict=True):
        if not row:
            raise UserError(f"{place}: has no token; a prompt needs at least one")
        if len(row) >= longest:
            raise UserError(
                f"{place}: {len(row)} tokens; the model has {longest} positions and needs one for the next token"
            )
    sampling, vocab_size = Sampling(temperature, top_k, top_p, seed), tokenizer.vocab_size
    ends = end_tokens(tokenizer) if chat else [] if tokenizer.document_end is None else [tokenizer.document_end]
    ends = [*ends, *trained.ends]
    if len(texts) == 1 and not as_json:
        stream = TextStream(tokenizer)

        def show(more: Sequence[int]) -> None:
            click.echo(stream.add(more), nl=False)

        show([] if chat else rows[0])
        generate_batch(trained.model, rows, tokens, sampling, longest, lambda _, token: show([token]), ends, vocab_size)
        click.echo()
        return
    found = generate_in_batches(trained.model, rows, tokens, sampling, longest, batch_size, ends, vocab_size)
    for number, (text, row, more) in enumerate(zip(texts, rows, found, strict=True)):
        whole = tokenizer.decode(more if chat else [*row, *more])
        if as_json:
            click.echo(json.dumps({"prompt": text, "answer" if chat else "text": whole}, ensure_ascii=False))
        else:
            click.echo(("\n" if number else "") + whole)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 20 else f"{text[:20]!r}…"


def _as_messages(tokenizer: "Tokenizer", texts: list[str], checkpoint: Path) -> list[list[int]]:
    """The tokens of each text as a user's message, up to the assistant's answer."""
    from hvd_transformer.data.chat_template import ChatTemplate
    from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer

    if not isinstance(tokenizer, PretrainedTokenizer):
        raise UserError(f"--chat: {checkpoint}: its tokenizer has no chat template")
    template = ChatTemplate(tokenizer, f"--chat: {checkpoint}")
    try:
        return [template.prompt([{"role": "user", "content": text}]).tolist() for text in texts]
    except ValueError as error:
        raise UserError(f"--chat: {error}") from None
