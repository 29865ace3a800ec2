"""`hvd-transformer logs`: what a job prints."""

import sys
import time
from typing import TYPE_CHECKING

import click

from hvd_transformer.cli import service_options
from hvd_transformer.cli.main import show as show_error
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.cli.log_reader import LogReader

_LOOK_SECONDS = 1.0


@click.command()
@click.argument("job", metavar="JOB|RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option(
    "--rank", metavar="N", default="launch", help="The log of this rank. Default: all that the launcher shows."
)
@click.option("-n", "--tail", "lines", type=click.IntRange(0), metavar="N", help="Begin with the last N lines.")
@service_options.server
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the text, and where it ends in the log.")
def logs(job: str, follow: bool, rank: str, lines: int | None, server: str | None, as_json: bool) -> None:
    """Print the log of a job, or of the run of a directory or id, from the service.

    Without one, logs are files in the run directory: logs/launch.log and logs/rank-NNN.log.
    """
    from hvd_transformer.cli.log_reader import LogReader

    if rank != "launch" and not rank.isdecimal():
        raise UserError(f"--rank {rank}: must be the number of a rank, or launch")
    if as_json and follow:
        raise UserError("--json: not with --follow")
    reader = LogReader(service_options.client_of(server), job, rank)
    if follow:
        _follow(reader, lines)
        return
    text = reader.text(lines)
    if as_json:
        whole = "".join(text)
        service_options.print_json({"run": reader.run, "rank": rank, "text": whole, "next": reader.offset})
        return
    for part in text:
        sys.stdout.write(part)


def _follow(reader: "LogReader", lines: int | None) -> None:
    """Print what is there, from the last `lines` on, and what comes, also while the service is restarted."""
    from hvd_transformer.cli.log_reader import Missing
    from hvd_transformer.service.remote.client import Busy, NoService

    away = False
    while True:
        try:
            ended = reader.ended()  # asked before reading, so that nothing is left out
            away = False
            try:
                for text in reader.text(lines):
                    lines = None
                    sys.stdout.write(text)
                sys.stdout.flush()
            except Missing:
                if ended:
                    raise
            if ended and reader.complete:
                return
        except (NoService, Busy) as error:
            if not away:
                show_error("hvd-transformer", f"{error}; still waiting")
            away = True
        time.sleep(_LOOK_SECONDS)
