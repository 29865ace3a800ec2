"""`hvd-transformer serve`: the training service, with a queue over hosts and pages of runs."""

import logging
import math
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import missing_extra

_WEBHOOK = "HVD_TRANSFORMER_WEBHOOK"  # for an address that is secret


class _OrNone(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A number, or `none`, which is infinity: it lifts a limit that is remembered."""

    def __init__(self, number: click.ParamType) -> None:  # type: ignore[type-arg]
        self._number, self.name = number, number.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return math.inf if value == "none" else self._number.convert(value, param, ctx)


def _limit(name: str, what: str) -> Callable[[options.F], options.F]:
    """An option for a limit per user, which is remembered."""
    return click.option(
        name, type=_OrNone(click.IntRange(0)), metavar="N", help=f"Limit per user, remembered: {what}. none: no limit."
    )


@click.command()
@click.option(
    "--runs", type=options.PATH, default="runs", show_default=True, metavar="DIR", help="Folder with the runs."
)
@click.option("--state", type=options.PATH, metavar="DIR", help="Folder for database and queue. Default: in your home.")
@click.option(
    "-H", "hosts", metavar="HOST:SLOTS,…", help="Hosts to add, such as h1:8,h2:8. Default: those of earlier times."
)
@options.hostfile
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(["slurm", "kubernetes"]),
    help="Queue jobs for this scheduler, also without hosts; repeatable. See `submit --engine`.",
)
@click.option("--address", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=int, default=8470, show_default=True, metavar="N", help="Port of the pages; 0: any.")
@click.option("--certificate", type=options.PATH, metavar="FILE", help="TLS certificate, with its chain, in PEM.")
@click.option("--key", type=options.PATH, metavar="FILE", help="Private key of the certificate, in PEM.")
@click.option("--behind-proxy", is_flag=True, help="A proxy with TLS is in front of the service.")
@click.option(
    "--public-host", "public_hosts", multiple=True, metavar="NAME", help="Name that browsers use; repeatable."
)
@click.option(
    "--webhook",
    envvar=_WEBHOOK,
    metavar="URL",
    help=f"Address to post JSON to when a job has ended. Default: ${_WEBHOOK}, which no list of processes shows.",
)
@click.option(
    "--retention-days",
    type=_OrNone(options.FiniteRange(0, min_open=True)),
    metavar="N",
    help="Forget jobs that ended N days ago, remembered. Runs stay. none: forget none.",
)
@_limit("--max-queued", "jobs that wait")
@_limit("--max-running", "jobs that run")
@_limit("--max-slots", "slots in use")
@_limit("--max-disk-gib", "GiB of run directories; a user who has more starts nothing")
@click.option(
    "--backup", type=options.PATH, metavar="FILE", help="Copy the database to FILE and exit; a service may be running."
)
def serve(
    runs: Path,
    state: Path | None,
    hosts: str | None,
    hostfile: Path | None,
    engines: tuple[str, ...],
    address: str,
    port: int,
    certificate: Path | None,
    key: Path | None,
    behind_proxy: bool,
    public_hosts: tuple[str, ...],
    webhook: str | None,
    retention_days: float | None,
    max_queued: float | None,
    max_running: float | None,
    max_slots: float | None,
    max_disk_gib: float | None,
    backup: Path | None,
) -> None:
    """Run a queue of jobs over hosts, and show their runs in a browser.

    `hvd-transformer serve -H h1:8,h2:8 --runs /shared/runs`

    `submit` queues jobs; they start when slots are free. Hosts are remembered; without any and without --engine, the
    service only shows the runs in the folder. Open the printed address in a browser on this machine, or through an ssh
    tunnel.

    Ctrl-C or SIGTERM ends the service; jobs go on, and the next `serve` takes them over.
    """
    os.environ.pop(_WEBHOOK, None)  # it may be secret: for this process alone, and not for the jobs
    try:
        from hvd_transformer.service.service import Options, TrainingService
    except ModuleNotFoundError as error:
        raise missing_extra("serve", error.name or "more packages", "service") from None
    from hvd_transformer.launch.host_pool import given_hosts
    from hvd_transformer.service.jobs import Engine, Host
    from hvd_transformer.service.remote.address import DATABASE, SOCKET, default_state
    from hvd_transformer.service.storage.backup import back_up
    from hvd_transformer.service.web.listening import Listening

    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    folder = default_state() if state is None else state.absolute()
    if backup is not None:
        back_up(folder / DATABASE, backup)
        click.echo(f"{backup}: has the database of {folder}")
        return
    found = given_hosts(hosts, hostfile) if hosts is not None or hostfile is not None else []
    limits = {
        "max_queued": max_queued,
        "max_running": max_running,
        "max_slots": max_slots,
        "disk_bytes": None if max_disk_gib is None else max_disk_gib * 2**30,
    }
    chosen = Options(
        folder,
        runs.absolute(),
        Listening(folder / SOCKET, address, port, certificate, key, behind_proxy, public_hosts),
        [Host(host.name, host.slots, host.gpus) for host in found],
        webhook,
        retention_days,
        {name: None if math.isinf(value) else int(value) for name, value in limits.items() if value is not None},
        [Engine(name) for name in engines],
    )
    with closing(TrainingService(chosen)) as service:
        what = "a queue over hosts, and runs" if service.has_queue else "no queue, as no hosts were named, but the runs"
        click.echo(f"hvd-transformer serves {what} in {chosen.runs}\n  open:  {service.link()}")
        sys.stdout.flush()
        service.run()
