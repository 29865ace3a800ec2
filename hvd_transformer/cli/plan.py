"""`hvd-transformer plan`: estimates the memory and the pipeline schedule of a configuration."""

import math
import shutil
from pathlib import Path

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError


@click.command()
@options.config_file
@options.preset
@click.option("--vocab-size", type=int, metavar="N", help="Vocabulary size, if no data is prepared yet.")
@click.option("-np", "ranks", type=int, metavar="N", help="Number of ranks, if they share the optimizer.")
@click.option("--memory-gib", type=float, metavar="N", help="Memory of a stage's device: says whether it suffices.")
@click.option("--output", type=options.PATH, metavar="FILE.png", help="Draw the pipeline schedules to this file.")
@options.settings
def plan(
    file: Path | None,
    preset: str | None,
    vocab_size: int | None,
    ranks: int | None,
    memory_gib: float | None,
    output: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Estimate what a job needs, without data, a GPU or training: parameters, memory per pipeline stage, and pipeline
    bubbles (how long the stages wait for each other).

    Takes the settings of hvd-train, for example
    `hvd-transformer plan --preset tutorial-1b --memory-gib 16 parallel.recompute=always`.
    """
    from hvd_transformer.config import load

    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise UserError(f"--memory-gib {memory_gib:g}: must be above 0")
    if output is not None and output.suffix.lower() != ".png":
        raise UserError(f"--output {output}: must end in .png")
    config = load(preset, file, settings)
    # Imported after the settings are checked: torch takes seconds.
    from hvd_transformer.parallel.pipeline_schedule import SCHEDULES
    from hvd_transformer.planning.memory_plan import make_plan
    from hvd_transformer.planning.plan_text import plan_text
    from hvd_transformer.planning.schedule_drawing import draw_png

    made = make_plan(config, vocab_size, ranks)
    width = min(shutil.get_terminal_size().columns, 120)
    click.echo(plan_text(made, max(width, 40), memory_gib))
    if output is not None:
        try:
            draw_png({schedule: made.timeline(schedule) for schedule in SCHEDULES}, output)
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written: {error.strerror}") from error
        click.echo(f"\nschedules: {output}")
