"""What the commands that use a trained model have in common: their lines of input, and where they run."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hvd_transformer.errors import UserError


class FiniteRange(click.FloatRange):
    """A range of numbers; nan, and infinity where the range is open, are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


checkpoint = click.argument("checkpoint", type=click.Path(path_type=Path))
device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
batch_size = click.option(
    "--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Lines at once, of similar length."
)
text_file = click.option(
    "--file", type=click.Path(path_type=Path), metavar="FILE", help="A text a line; without it, standard input."
)


def check_checkpoint(path: Path) -> None:
    """Raises `UserError` for what is wrong at first sight: before torch is imported, which takes seconds."""
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint folder")
    if not any((path / name).exists() for name in ("checkpoints", "MANIFEST.json", "config.json")):
        raise UserError(f"{path}: neither a run directory nor a checkpoint nor an exported folder")


def chosen_device(name: str) -> str:
    """ "auto" is a GPU where there is one. Raises `UserError`."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU that torch can use")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def lines_of(file: Path | None) -> Iterator[str]:
    """Of the file or of standard input, without their ends. Raises `UserError`."""
    from hvd_transformer.data.text_files import read_lines

    if file is not None:
        yield from read_lines(file)
    else:
        for line in sys.stdin:
            yield line.rstrip("\r\n")


def window(file: Path | None) -> dict[str, Any]:
    """Who types lines wants each answered at once."""
    return {"window": 1} if file is None and sys.stdin.isatty() else {}
