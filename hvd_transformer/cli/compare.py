"""`hvd-transformer compare`: what differs between runs, and how they ended."""

import click

from hvd_transformer.cli import service_options
from hvd_transformer.errors import UserError

_MOST = 20


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="JOB|RUN...")
@service_options.server
@service_options.as_json
def compare(runs: tuple[str, ...], server: str | None, as_json: bool) -> None:
    """Show the configuration keys in which jobs or runs differ, and their final metrics.

    `hvd-transformer compare 7 8 runs/last-week`

    Also works while the service is down; run directories alone need no service.
    """
    if not 2 <= len(set(runs)) == len(runs) <= _MOST:
        raise UserError(f"give 2 to {_MOST} different jobs or runs to compare")
    found = service_options.reading(server, runs).compare(runs)
    if as_json:
        service_options.print_json(found)
        return
    from hvd_transformer.cli.service_tables import print_table
    from hvd_transformer.config.schema import shown

    names = [run["name"] for run in found["runs"]]
    rows = [["state", *(run["state"] for run in found["runs"])], ["step", *(run["step"] for run in found["runs"])]]
    rows += [[key, *(map(shown, values))] for key, values in found["differs"].items()]
    rows += [[key, *values] for key, values in found["final"].items()]
    print_table(["", *names], rows, capitals=False)
