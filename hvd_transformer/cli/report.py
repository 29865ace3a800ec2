"""`hvd-transformer report`: draw a run directory's curves again."""

from pathlib import Path

import click


@click.command()
@click.argument("run_directory", type=click.Path(path_type=Path))
def report(run_directory: Path) -> None:
    """Draw the curves of RUN_DIRECTORY: loss.png, learning_rate.png, throughput.png, those of a task's own metrics
    (bleu.png, scores.png), and all in report.html.

    Works while the run goes on, too. Prints the path of report.html.
    """
    from hvd_transformer.errors import UserError
    from hvd_transformer.reporting.run_report import write_report

    try:
        path = write_report(run_directory)
    except OSError as error:
        raise UserError(f"{run_directory}: cannot write the report: {error.strerror}") from error
    click.echo(path)
