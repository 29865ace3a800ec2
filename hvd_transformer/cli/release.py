"""`hvd-transformer release`: lets jobs of the service start that were on hold."""

import click

from hvd_transformer.cli import service_options


@click.command()
@service_options.jobs
@service_options.server
@service_options.as_json
def release(jobs: list[int], server: str | None, as_json: bool) -> None:
    """Let jobs start that were submitted with --hold or put on hold; they keep their place in the queue."""
    service_options.change(server, jobs, "release", "is queued", as_json)
