"""`hvd-transformer doctor`: checks the hosts of a job and reports their problems."""

import json
import os
import sys
from pathlib import Path

import click

from hvd_transformer.cli import options


@click.command(cls=options.WithJobArguments)
@options.hosts
@options.hostfile
@options.ssh_port
@options.ssh_identity
@options.network_interface
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[-- HVD-TRAIN'S ARGUMENTS...]")
def doctor(
    hosts: str | None,
    hostfile: Path | None,
    ssh_port: int | None,
    ssh_identity: Path | None,
    network_interface: str | None,
    as_json: bool,
    settings: tuple[str, ...],
) -> None:
    """Check all hosts in parallel, up to 32 within ten seconds: ssh access, software versions, clocks, folders, GPUs
    for the slots, and the network, whose bandwidth is measured. Two ranks then run an allreduce on two GPUs of a host.

    `hvd-transformer doctor -H h1:2,h2:2 -- --preset python-docs output_dir=runs/four`

    Every finding says what to do. Exit code 0: nothing prevents the job. Exit code 1: something does.
    """
    from rich.console import Console

    from hvd_transformer.cli.train import config_of
    from hvd_transformer.launch.connection.ssh import Ssh
    from hvd_transformer.launch.doctor.examine import examine
    from hvd_transformer.launch.doctor.findings import Job
    from hvd_transformer.launch.doctor.findings_table import as_table, to_json
    from hvd_transformer.launch.horovodrun_command import Horovodrun, launcher_environment
    from hvd_transformer.launch.host_pool import given_hosts

    wanted = given_hosts(hosts, hostfile)
    horovodrun = Horovodrun(wanted, ssh=Ssh(ssh_port, ssh_identity), network_interface=network_interface)
    job = Job.of(horovodrun, config_of(settings))._replace(is_given=bool(settings))
    found = examine(job, horovodrun.ssh, launcher_environment(os.environ, []))
    if as_json:
        click.echo(json.dumps(to_json(found), indent=2))
    else:
        Console().print(as_table(found, [host.name for host in wanted]))
    sys.exit(int(any(finding.problem for finding in found.findings)))
