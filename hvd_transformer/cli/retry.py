"""`hvd-transformer retry`: starts jobs of the service again that have failed or were cancelled."""

import click

from hvd_transformer.cli import service_options


@click.command()
@service_options.jobs
@service_options.server
@service_options.as_json
def retry(jobs: list[int], server: str | None, as_json: bool) -> None:
    """Queue jobs again that have failed or were cancelled; they resume from their newest checkpoint."""
    service_options.change(server, jobs, "retry", "is queued again", as_json)
