"""`hvd-transformer wait`: waits until jobs of the service have ended."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from hvd_transformer.cli import service_options
from hvd_transformer.cli.main import show as show_error

if TYPE_CHECKING:
    from hvd_transformer.service.remote.client import Client

_PAUSE_SECONDS = 2.0  # between two attempts to reach the service
POLL_SECONDS = 5.0  # between two looks at jobs of whose events the service does not tell, as too many listen
_FEW = 20  # jobs that are looked at one by one


@click.command()
@service_options.jobs
@service_options.server
@service_options.as_json
def wait(jobs: list[int], server: str | None, as_json: bool) -> None:
    """Wait until the jobs have ended. The exit code is the job's; of several jobs, the first one that is not 0.

    `hvd-transformer wait 7 && hvd-transformer translate runs/tiny-7`

    Keeps waiting while the service is restarted or busy.
    """
    found: dict[int, dict[str, Any]] = {}
    for job in ends(service_options.client_of(server), jobs):
        found[job["id"]] = job
        if not as_json:
            why = f": {job['reason']}" if job["reason"] else ""
            click.echo(f"job {job['id']} ({job['name']}): {job['state']}{why}")
    codes = [exit_code(found[number]) for number in jobs]
    code = next(filter(None, codes), 0)
    if as_json:
        service_options.print_json({"jobs": [found[number] for number in jobs], "codes": codes, "code": code})
    sys.exit(code)


def ends(client: "Client", jobs: list[int]) -> Iterator[dict[str, Any]]:
    """The jobs, each when it has ended. The first look at them tells whether the service is there and knows them."""
    from hvd_transformer.service.jobs import ENDED
    from hvd_transformer.service.remote.client import Busy, NoService

    pending, known, away = dict.fromkeys(jobs), False, False
    while pending:
        seconds = _PAUSE_SECONDS
        try:
            for kind, data in _events(client):
                if kind == "refused":
                    look, seconds = perhaps_ended(client, list(pending)), POLL_SECONDS
                elif kind in ("open", "resync"):
                    look = list(pending)
                elif kind == "ping":  # in case an event was lost: one job after the other
                    look = [next(iter(pending))]
                    pending[look[0]] = pending.pop(look[0])
                else:
                    look = [data["id"]] if kind == "job" else []
                for number in look:
                    if number in pending and (job := client.get(f"jobs/{number}"))["state"] in ENDED:
                        del pending[number]
                        yield job
                known, away = True, False
                if not pending:
                    return
        except (NoService, Busy) as error:
            if not known and isinstance(error, NoService):
                raise
            if not away:
                show_error("hvd-transformer", f"{error}; still waiting")
            away = True
        time.sleep(seconds)


def _events(client: "Client") -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of the service; one "refused" alone where too many listen to them already."""
    from hvd_transformer.service.remote.client import Busy

    try:
        yield from client.events()
    except Busy:
        yield "refused", {}


def perhaps_ended(client: "Client", pending: list[int]) -> list[int]:
    """The jobs that a look may find ended. Many are compared with the list of those that have not."""
    from hvd_transformer.service.jobs import ENDED, State

    if len(pending) <= _FEW:
        return pending
    states = ",".join(state.value for state in State if state not in ENDED)
    open_ = {job["id"] for job in client.items("jobs", state=states, limit=500)}
    return [number for number in pending if number not in open_]


def exit_code(job: dict[str, Any]) -> int:
    """The exit code of a job that has ended; never 0 unless it has succeeded."""
    if job["state"] == "SUCCEEDED":
        return 0
    code = job["attempts"][-1]["code"] if job["attempts"] else None
    if code is not None and code < 0:  # ended by a signal
        return 128 - int(code)
    return int(code or 1)
