"""`hvd-transformer report`: redraws the charts of a run directory."""

from pathlib import Path

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError


@click.command()
@click.argument("run_directory", type=options.PATH)
def report(run_directory: Path) -> None:
    """Draw the charts of RUN_DIRECTORY: loss.png, learning_rate.png, throughput.png, the task's metrics (bleu.png,
    scores.png), and report.html with all of them.

    Also works while the run is in progress. Prints the path of report.html.
    """
    from hvd_transformer.reporting.run_report import write_report

    try:
        path = write_report(run_directory)
    except OSError as error:
        raise UserError(f"{run_directory}: cannot write the report: {error.strerror}") from error
    click.echo(path)
