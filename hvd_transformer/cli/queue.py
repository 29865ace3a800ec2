"""`hvd-transformer queue`: the jobs of the service."""

import time
from typing import Any

import click

from hvd_transformer.cli import service_options

# In the order in which they are shown.
_STATES = ("STOPPING", "RUNNING", "STARTING", "QUEUED", "HELD")
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


@click.command()
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([*_STATES, *_ENDED], case_sensitive=False),
    help="Only jobs in this state; repeatable. Default: all that have not ended.",
)
@click.option("--all", "everything", is_flag=True, help="Also jobs that have ended.")
@click.option("--user", metavar="USER", help="Only jobs of this user.")
@click.option("--tag", metavar="TAG", help="Only jobs with this tag.")
@service_options.server
@service_options.as_json
def queue(
    states: tuple[str, ...], everything: bool, user: str | None, tag: str | None, server: str | None, as_json: bool
) -> None:
    """List the jobs that wait and run: why each waits, when it is likely to start, where it runs.

    Also works while the service is down.
    """
    from hvd_transformer.cli.service_tables import duration, hosts_of, print_table, ranks_of, until

    wanted = states or ((*_STATES, *_ENDED) if everything else _STATES)
    source = service_options.reading(server)
    jobs = sorted(source.jobs(wanted, user, tag), key=lambda job: wanted.index(job["state"]))
    if as_json:
        service_options.print_json({"jobs": jobs})
        return

    def status(job: dict[str, Any]) -> str:
        if job["allocation"]:
            return hosts_of(job["allocation"])
        engine = "" if job["engine"] == "hosts" else job["engine"]
        words = [engine, job["reason"], f"starts {until(job['estimated_start'])}" if job["estimated_start"] else ""]
        return "; ".join(filter(None, words))

    now = time.time()
    print_table(
        ["id", "name", "user", "state", "priority", "ranks", "submitted", "hosts or reason"],
        [
            [
                job["id"],
                job["name"],
                job["owner"],
                job["state"],
                job["priority"],
                ranks_of(job["needs"]),
                f"{duration(now - job['submitted'])} ago",
                status(job),
            ]
            for job in jobs
        ],
    )
