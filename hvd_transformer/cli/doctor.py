"""`hvd-transformer doctor`: what is wrong with which host."""

from pathlib import Path

import click


@click.command()
@click.option("-H", "hosts", metavar="HOST:SLOTS,…", help="The hosts: h1:2,h2:2 or node[01-08]:4. Default: localhost.")
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="The hosts, one a line.")
@click.option("--ssh-port", type=int, metavar="N", help="The same on all hosts.")
@click.option("--ssh-identity", type=click.Path(path_type=Path), metavar="FILE", help="The private key.")
@click.option("--network-interface", metavar="NAME", help="Such as eth0. Default: one that all hosts have in common.")
@click.option("--json", "machine", is_flag=True, help="Print what was found as JSON.")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[-- HVD-TRAIN'S ARGUMENTS...]")
def doctor(
    hosts: str | None,
    hostfile: Path | None,
    ssh_port: int | None,
    ssh_identity: Path | None,
    network_interface: str | None,
    machine: bool,
    settings: tuple[str, ...],
) -> None:
    """Examine all hosts at once, within ten seconds: is each reachable, with the same software, clock and folders, the
    devices that its slots need, and a network between them, whose speed is measured.

    `hvd-transformer doctor -H h1:2,h2:2 -- --preset python-docs output_dir=runs/four`

    Every finding says what to do. The exit code is 0 where nothing is in the way of a job, and 1 where something is.
    """
    import json
    import os
    import sys

    from rich.console import Console

    from hvd_transformer.cli.train import command as train
    from hvd_transformer.config import load
    from hvd_transformer.errors import UserError
    from hvd_transformer.launch import horovodrun_command
    from hvd_transformer.launch.doctor.examine import examine
    from hvd_transformer.launch.doctor.findings import Job
    from hvd_transformer.launch.doctor.findings_table import as_json, as_table
    from hvd_transformer.launch.horovodrun_command import Horovodrun
    from hvd_transformer.launch.hostfile import Host, parse_hosts, read_hostfile
    from hvd_transformer.launch.ssh import Ssh

    if hosts is not None and hostfile is not None:
        raise UserError("-H and --hostfile: give one of them")
    if hosts is not None:
        wanted = parse_hosts(hosts)
    else:
        wanted = [Host("localhost", 1)] if hostfile is None else read_hostfile(hostfile)
    horovodrun = Horovodrun(wanted, ssh=Ssh(ssh_port, ssh_identity), network_interface=network_interface)
    given = train.make_context("hvd-train", list(settings)).params
    config = load(given["preset"], given["file"], given["settings"])
    found = examine(Job.of(horovodrun, config), horovodrun.ssh, horovodrun_command.launcher_environment(os.environ, []))
    if machine:
        click.echo(json.dumps(as_json(found), indent=2))
    else:
        Console().print(as_table(found, [host.name for host in wanted]))
    sys.exit(int(any(finding.problem for finding in found.findings)))
