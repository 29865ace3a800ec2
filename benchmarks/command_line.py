"""The command line of the paired benchmarks: their options, and what they print, write and exit with."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.group import Contestant, ContestantFailed
from benchmarks.paired import LossesDiffer, Options, Result, Target, as_json, measure, rounded, table
from hvd_transformer.atomic import write_text


def measuring(command: Callable[..., None]) -> Callable[..., None]:
    """A benchmark's options: `rounds`, `steps`, `warmup` and `file`."""
    for option in reversed(
        [
            click.option("--rounds", default=21, show_default=True, type=click.IntRange(1), help="Blocks of each."),
            click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Measured a block."),
            click.option("--warmup", default=1, show_default=True, type=click.IntRange(0), help="Before, unmeasured."),
            click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too."),
        ]
    ):
        command = option(command)
    return command


def run(
    contestants: Sequence[Contestant],
    targets: Sequence[Target],
    options: Options,
    file: Path | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Measures, prints the table, writes every figure and `more` to the file; ends the process where one failed."""
    result = measured(contestants, options)
    click.echo(table(result, targets))
    write_figures(file, {**as_json(result, targets), **(more or {})})


def measured(contestants: Sequence[Contestant], options: Options) -> Result:
    """What was measured; a contestant that failed and losses that differ end the process with one line."""
    try:
        return measure(contestants, options, lambda line: click.echo(line, err=True))
    except (ContestantFailed, LossesDiffer) as error:
        click.echo(f"benchmark: {error}", err=True)
        sys.exit(1)


def write_figures(file: Path | None, figures: Mapping[str, Any]) -> None:
    """As JSON, a line per entry, five digits per number; those of RESULTS.md's tables are in benchmarks/results."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in figures.items()]
        write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")
