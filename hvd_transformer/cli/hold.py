"""`hvd-transformer hold`: keeps jobs of the service from starting."""

import click

from hvd_transformer.cli import service_options


@click.command()
@service_options.jobs
@service_options.server
@service_options.as_json
def hold(jobs: list[int], server: str | None, as_json: bool) -> None:
    """Keep jobs from starting until `release`; running ones save and stop, and resume from there when released."""
    service_options.change(server, jobs, "hold", "is on hold", as_json)
