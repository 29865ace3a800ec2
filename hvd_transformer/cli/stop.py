"""`hvd-transformer stop`: ends a job that runs under a launcher."""

from contextlib import closing
from pathlib import Path

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError


@click.command()
@click.argument("run", type=options.PATH)
@click.option("--now", is_flag=True, help="Kill the ranks. Default: let them save first.")
def stop(run: Path, now: bool) -> None:
    """Ask the launcher of the run directory RUN to end its job, and wait for the end. The ranks save before.

    The same `launch` command resumes the job later.
    """
    from hvd_transformer.launch.output.launch_client import LaunchClient

    with closing(LaunchClient(run)) as client:
        client.ask("kill" if now else "stop")
        code = client.show()
    while code is None:  # the launcher has closed a connection that was not read, or has ended
        try:
            with closing(LaunchClient(run)) as client:
                code = client.show()
        except UserError:
            return
