"""`hvd-transformer cancel`: ends jobs of the service."""

import click

from hvd_transformer.cli import service_options


@click.command()
@service_options.jobs
@click.option("--now", is_flag=True, help="Kill the ranks. Default: let them save first.")
@service_options.server
@service_options.as_json
def cancel(jobs: list[int], now: bool, server: str | None, as_json: bool) -> None:
    """End jobs: waiting ones are taken out of the queue, running ones save and stop.

    `hvd-transformer cancel 7 12-40`
    """
    service_options.change(server, jobs, "cancel", "is being cancelled", as_json, now=now)
