"""Translating a file's lines in batches of about the same length, against one line after the other.

Both in one process, with the same model, beam and lines; in each round both translate all of them, in alternating
order, and the ratio is taken round by round.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import click
import torch

from benchmarks.machine import machine
from hvd_transformer.atomic import write_text
from hvd_transformer.data.text_files import read_lines
from hvd_transformer.data.tokenizers import Ids
from hvd_transformer.inference.predict import in_batches, translate
from hvd_transformer.inference.trained_model import Trained, load_trained
from hvd_transformer.models.encoder_decoder import EncoderDecoder


@dataclass(frozen=True)
class Result:
    """Seconds of every round, by batch size, and what each made of the lines."""

    seconds: dict[int, list[float]]
    texts: dict[int, list[str]]

    @property
    def sizes(self) -> tuple[int, int]:
        """One, and the other."""
        single, batched = self.seconds
        return single, batched

    @property
    def num_lines(self) -> int:
        return len(self.texts[self.sizes[0]])

    @property
    def differing(self) -> int:
        """Lines whose two translations are not the same."""
        single, batched = (self.texts[size] for size in self.sizes)
        return sum(one != other for one, other in zip(single, batched, strict=True))

    @property
    def ratios(self) -> list[float]:
        """How many times faster in batches, round by round."""
        single, batched = (self.seconds[size] for size in self.sizes)
        return [one / other for one, other in zip(single, batched, strict=True)]


def translated(trained: Trained, lines: Sequence[str], beam: int, batch_size: int) -> list[str]:
    """As the `translate` command does it."""
    model, longest, penalty = trained.model, trained.config.max_length, trained.translation.length_penalty
    assert isinstance(model, EncoderDecoder)

    def work(sources: list[Ids]) -> list[str]:
        found = translate(model, sources, longest, beam=beam, length_penalty=penalty)
        return [trained.tokenizers["target"].decode_line(best[0].tokens) for best in found]

    encode = trained.tokenizers["source"].encode_lines
    return [text or "" for _, text in in_batches(lines, encode, work, batch_size)]


def measure(trained: Trained, lines: Sequence[str], beam: int, batch_size: int, rounds: int) -> Result:
    """After some lines unmeasured, which import what is needed."""
    sizes = [1, batch_size]
    result = Result({size: [] for size in sizes}, {})
    for size in sizes:
        translated(trained, lines[:8], beam, size)
    for number in range(rounds):
        for size in sizes[::-1] if number % 2 else sizes:
            began = time.perf_counter()
            result.texts[size] = translated(trained, lines, beam, size)
            result.seconds[size].append(time.perf_counter() - began)
        click.echo(f"round {number + 1} of {rounds}", err=True)
    return result


def table(result: Result, beam: int) -> str:
    """The figures for people."""
    lines = [f"{'sentences a second':<20}{'least':>9}{'median':>9}{'most':>9}"]
    for size, seconds in result.seconds.items():
        rates = [result.num_lines / own for own in seconds]
        spread = "".join(f"{value:>9.2f}" for value in (min(rates), median(rates), max(rates)))
        lines.append(f"{f'batches of {size}':<20}{spread}")
    spread = "".join(f"{value:>9.2f}" for value in (min(result.ratios), median(result.ratios), max(result.ratios)))
    single, batched = (median(result.seconds[size]) for size in result.sizes)
    lines += [
        f"{'ratio by round':<20}{spread}",
        f"{'ratio of medians':<20}{single / batched:>18.2f}",
        "",
        f"{result.differing} of {result.num_lines} lines differ; beam {beam}, {len(result.ratios)} rounds, "
        f"{torch.get_num_threads()} threads, {machine()}",
    ]
    return "\n".join(lines)


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("text", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--lines", "most", default=200, show_default=True, type=click.IntRange(1), help="The first of FILE.")
@click.option("--beam", type=click.IntRange(1), help="Hypotheses kept. Default: as trained with.")
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(2))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this file, too.")
def main(
    checkpoint: Path, text: Path, most: int, beam: int | None, batch_size: int, rounds: int, file: Path | None
) -> None:
    """Measure translating the lines of FILE with CHECKPOINT, in batches and one by one."""
    trained = load_trained(checkpoint, "translation")
    beam = beam or trained.translation.beam
    result = measure(trained, list(islice(read_lines(text), most)), beam, batch_size, rounds)
    click.echo(table(result, beam))
    if file is not None:
        figures = {"machine": machine(), "lines": result.num_lines, "beam": beam, "seconds": result.seconds}
        write_text(file, json.dumps({**figures, "differing": result.differing}, indent=1) + "\n")


if __name__ == "__main__":
    main()
