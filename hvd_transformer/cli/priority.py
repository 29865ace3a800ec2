"""`hvd-transformer priority`: changes how urgent a job of the service is."""

import click

from hvd_transformer.cli import service_options


@click.command(context_settings={"ignore_unknown_options": True})
@service_options.job
@click.argument("number", type=click.IntRange(-1000, 1000), metavar="N")
@service_options.server
@service_options.as_json
def priority(job: int, number: int, server: str | None, as_json: bool) -> None:
    """Set the priority of a job to N, from -1000 to 1000; jobs begin with 0.

    Jobs of a higher priority start first, and stop running ones of a lower priority if that makes room.
    """
    changed = service_options.client_of(server).post(f"jobs/{job}/priority", {"priority": number})
    if as_json:
        service_options.print_json(changed)
    else:
        click.echo(f"job {job}: has priority {changed['priority']}")
