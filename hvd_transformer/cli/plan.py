"""`hvd-transformer plan`: what a configuration needs, before anything is trained."""

from pathlib import Path

import click


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Settings as YAML.")
@click.option("--preset", metavar="NAME", help="Settings that come with the package; `hvd-train --help` lists them.")
@click.option("--vocab-size", type=int, metavar="N", help="Tokens of the vocabulary, where no data is prepared yet.")
@click.option("-np", "ranks", type=int, metavar="N", help="The job's ranks, where they share the optimizer.")
@click.option("--memory-gib", type=float, metavar="N", help="What a stage's device has: says whether it is enough.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw both schedules there.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
def plan(
    file: Path | None,
    preset: str | None,
    vocab_size: int | None,
    ranks: int | None,
    memory_gib: float | None,
    output: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Show what a job needs, without data, a GPU or training: parameters, the memory of each pipeline stage, and how
    long the stages wait for each other.

    Takes the same settings as hvd-train: for example
    `hvd-transformer plan --preset tutorial-1b --memory-gib 16 parallel.recompute=always`.
    """
    import math
    import shutil

    from hvd_transformer.config import load
    from hvd_transformer.errors import UserError

    if memory_gib is not None and not (memory_gib > 0 and math.isfinite(memory_gib)):
        raise UserError(f"--memory-gib {memory_gib:g}: must be above 0")
    if output is not None and output.suffix.lower() != ".png":
        raise UserError(f"--output {output}: must end in .png")
    config = load(preset, file, settings)
    # Not before all that can be wrong without them: torch takes seconds.
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
