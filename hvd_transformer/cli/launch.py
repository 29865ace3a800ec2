"""`hvd-transformer launch`: train on the ranks of many hosts, through horovodrun."""

from pathlib import Path

import click


@click.command()
@click.option("-np", "num_ranks", type=int, metavar="N", help="Ranks. Default: one for each slot of the hosts.")
@click.option("-H", "hosts", metavar="HOST:SLOTS,…", help="The hosts: h1:2,h2:2 or node[01-08]:4. Default: localhost.")
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="The hosts, one a line.")
@click.option("--gloo/--mpi", default=True, help="What the ranks talk through. MPI must be the same on all hosts.")
@click.option("--ssh-port", type=int, metavar="N", help="The same on all hosts.")
@click.option("--ssh-identity", type=click.Path(path_type=Path), metavar="FILE", help="The private key.")
@click.option("--network-interface", metavar="NAME", help="Such as eth0. Default: one that all hosts have in common.")
@click.option("--env", "named", multiple=True, metavar="NAME", help="A variable that the ranks get. May be repeated.")
@click.option("--timeline", type=click.Path(path_type=Path), metavar="FILE", help="Write Horovod's timeline there.")
@click.option("--autotune", is_flag=True, help="Let Horovod search its fusion and cycle time.")
@click.option("--no-preflight", is_flag=True, help="Start without a look at the hosts (`hvd-transformer doctor`).")
@click.option("--dry-run", is_flag=True, help="Print the horovodrun command, and start nothing.")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[-- HVD-TRAIN'S ARGUMENTS...]")
def launch(
    num_ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    gloo: bool,
    ssh_port: int | None,
    ssh_identity: Path | None,
    network_interface: str | None,
    named: tuple[str, ...],
    timeline: Path | None,
    autotune: bool,
    no_preflight: bool,
    dry_run: bool,
    settings: tuple[str, ...],
) -> None:
    """Run hvd-train on every slot of the hosts: what follows `--` are its arguments, checked before anything starts.

    `hvd-transformer launch -np 4 -H h1:2,h2:2 -- --preset python-docs output_dir=runs/four`

    Of this environment the ranks get what commands, locale, threads, Horovod, NCCL and Open MPI need, and the
    variables of --env, whose values no command line shows. Ctrl-C lets the ranks save and end; a second one ends them
    at once. The exit code is that of the rank that failed first.
    """
    import os
    import shlex
    import shutil
    import sys

    from hvd_transformer.cli.train import command as train
    from hvd_transformer.config import load
    from hvd_transformer.errors import UserError
    from hvd_transformer.launch import environment
    from hvd_transformer.launch.command import Horovodrun, Ssh
    from hvd_transformer.launch.doctor.examine import preflight
    from hvd_transformer.launch.doctor.findings import Job
    from hvd_transformer.launch.hostfile import Host, assign, parse_hosts, read_hostfile
    from hvd_transformer.launch.job import run

    if num_ranks is not None and num_ranks < 1:
        raise UserError(f"-np {num_ranks}: must be at least 1")
    if hosts is not None and hostfile is not None:
        raise UserError("-H and --hostfile: give one of them")
    if hosts is not None:
        found = parse_hosts(hosts)
    elif hostfile is not None:
        found = read_hostfile(hostfile)
    else:
        found = [Host("localhost", num_ranks or 1)]
    if num_ranks is not None:
        found = assign(found, num_ranks)
    horovodrun = Horovodrun(found, not gloo, Ssh(ssh_port, ssh_identity), network_interface, timeline, autotune)
    values = environment.named_values(os.environ, named)
    given = train.make_context("hvd-train", list(settings)).params
    config = load(given["preset"], given["file"], given["settings"])

    worker = ["hvd-train", *settings]
    if dry_run:
        click.echo(shlex.join(horovodrun.words(worker)))
        return
    minimal = environment.minimal(os.environ, named)
    if shutil.which("horovodrun", path=minimal["PATH"]) is None:
        raise UserError("horovodrun: not found; install Horovod, as `make install` does")
    if not no_preflight:
        preflight(Job.of(horovodrun, config), horovodrun.ssh, minimal)
    ended = run(horovodrun, worker, values, minimal)
    if ended.first is not None and not ended.stopped:
        first = ended.first
        print(
            f"hvd-transformer: rank {first.rank} on host {first.host} failed first, with exit code {first.code}",
            file=sys.stderr,
        )
    sys.exit(ended.code)
