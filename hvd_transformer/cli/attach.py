"""`hvd-transformer attach`: sees a job that runs under a launcher, from another terminal."""

import sys
from contextlib import closing
from pathlib import Path

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError


@click.command()
@click.argument("run", type=options.PATH)
def attach(run: Path) -> None:
    """Show the job of the run directory RUN as its launcher does, with its last lines first.

    Ctrl-C leaves the job alone. If it ends, the exit code is the job's.
    """
    from hvd_transformer.launch.output.launch_client import LaunchClient, why_it_ended

    with closing(LaunchClient(run)) as client:
        try:
            code = client.show()
        except KeyboardInterrupt:
            click.echo("left; the job runs on", err=True)
            return
    if code is None:
        raise UserError(f"{run}: {why_it_ended(run)}")
    sys.exit(code)
