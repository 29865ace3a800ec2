"""`hvd-transformer launch`: train on the ranks of many hosts, through horovodrun."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hvd_transformer.atomic import write_text
from hvd_transformer.errors import UserError
from hvd_transformer.launch.scheduler import compose, kubernetes, slurm
from hvd_transformer.launch.scheduler.scheduled_job import ScheduledJob

if TYPE_CHECKING:
    from hvd_transformer.config import Config


@dataclass(frozen=True)
class Launched:
    """`words` are the worker's command line, `again` those of a restart. `trains`: it writes a run directory."""

    words: list[str]
    again: list[str]
    config: "Config"
    trains: bool

    @property
    def log(self) -> Path | None:
        """Where all that the ranks print is kept."""
        return Path(self.config.output_dir).expanduser() / "logs" / "launch.log" if self.trains else None


def worker_of(words: Sequence[str]) -> Launched:
    """hvd-train with these arguments; or `hvd-transformer evaluate`, where they begin so. Raises `UserError`."""
    return _evaluate(words) if words[:1] == ("evaluate",) else _train(words)


def _train(words: Sequence[str]) -> Launched:
    from hvd_transformer.cli.train import command as train
    from hvd_transformer.config import load

    given = train.make_context("hvd-train", list(words)).params
    config = load(given["preset"], given["file"], given["settings"])
    worker = ["hvd-train", *words]
    return Launched(
        worker, [*worker, "checkpoint.resume=auto"] if config.checkpoint.resume == "never" else worker, config, True
    )


def _evaluate(words: Sequence[str]) -> Launched:
    from hvd_transformer.cli.evaluate import check, evaluate

    given = evaluate.make_context("evaluate", list(words[1:])).params
    check(given["checkpoint"], given["settings"])
    from hvd_transformer.checkpoint.saved_run import read_checkpoint
    from hvd_transformer.training.evaluate_job import Request, evaluation_config

    request = Request(given["checkpoint"], given["settings"], given["split"], given["data"])
    worker = ["hvd-transformer", *words]
    return Launched(worker, worker, evaluation_config(read_checkpoint(request.checkpoint), request), False)


_KINDS = {
    "slurm": (slurm.NAME, slurm.script, "sbatch {}"),
    "kubernetes": (kubernetes.NAME, kubernetes.manifest, "kubectl apply -f {}"),
    "compose": (compose.NAME, compose.services, "docker compose -f {} run --rm launcher"),
}


def scheduled(scheduler: str | None, job: ScheduledJob, folder: Path | None, dry_run: bool) -> str:
    """Writes the job's file for "slurm", "kubernetes" or "compose"; the line that tells how to submit it.

    With `dry_run` the file's text, and nothing is written. Raises `UserError` where the file cannot express the job,
    is there already, or cannot be written.
    """
    if scheduler is None:
        raise UserError("--output and --image: only with --scheduler")
    name, make, submit = _KINDS[scheduler]
    content = make(job)
    if dry_run:
        return content.rstrip("\n")
    if folder is None:
        raise UserError(f"--scheduler {scheduler}: needs --output, the folder for its file")
    file = folder / name
    if file.exists():
        raise UserError(f"{file}: is there already; remove it or choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, content)
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None
    return f"{file}: written; submit it with: {submit.format(shlex.quote(str(file)))}"


@click.command()
@click.option("-np", "num_ranks", type=int, metavar="N", help="Ranks. Default: one for each slot of the hosts.")
@click.option("-H", "hosts", metavar="HOST:SLOTS,…", help="The hosts: h1:2,h2:2 or node[01-08]:4. Default: localhost.")
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="The hosts, one a line.")
@click.option(
    "--gloo/--mpi",
    default=None,
    help="What the ranks talk through. MPI must be the same on all hosts. Default: gloo, where Horovod has it.",
)
@click.option("--ssh-port", type=int, metavar="N", help="The same on all hosts.")
@click.option("--ssh-identity", type=click.Path(path_type=Path), metavar="FILE", help="The private key.")
@click.option("--network-interface", metavar="NAME", help="Such as eth0. Default: one that all hosts have in common.")
@click.option("--env", "named", multiple=True, metavar="NAME", help="A variable that the ranks get. May be repeated.")
@click.option("--timeline", type=click.Path(path_type=Path), metavar="FILE", help="Write Horovod's timeline there.")
@click.option("--autotune", is_flag=True, help="Let Horovod search its fusion and cycle time.")
@click.option("--restarts", type=int, default=0, metavar="N", help="Go on from the last checkpoint up to N times.")
@click.option("--min-np", "min_ranks", type=int, metavar="N", help="Go on with so few ranks. Default: all of -np.")
@click.option(
    "--host-discovery-script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prints the hosts of now, one a line; asked again and again.",
)
@click.option("--no-preflight", is_flag=True, help="Start without a look at the hosts (`hvd-transformer doctor`).")
@click.option("--dry-run", is_flag=True, help="Print the horovodrun command, and start nothing.")
@click.option(
    "--scheduler",
    type=click.Choice(["slurm", "kubernetes", "compose"]),
    help="Write the job's file for it, and start nothing.",
)
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Where --scheduler writes the file.")
@click.option("--image", metavar="NAME", help="Of its containers. Default: hvd-transformer:cpu, or :gpu for CUDA.")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[-- [evaluate] ARGUMENTS...]")
def launch(
    num_ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    gloo: bool | None,
    ssh_port: int | None,
    ssh_identity: Path | None,
    network_interface: str | None,
    named: tuple[str, ...],
    timeline: Path | None,
    autotune: bool,
    restarts: int,
    min_ranks: int | None,
    host_discovery_script: Path | None,
    no_preflight: bool,
    dry_run: bool,
    scheduler: str | None,
    output: Path | None,
    image: str | None,
    settings: tuple[str, ...],
) -> None:
    """Run hvd-train on every slot of the hosts: what follows `--` are its arguments, checked before anything starts.

    `hvd-transformer launch -np 4 -H h1:2,h2:2 -- --preset python-docs output_dir=runs/four`

    Or `hvd-transformer evaluate` with what follows that word: `… -- evaluate runs/four --split valid`.

    Of this environment the ranks get what commands, locale, threads, Horovod, NCCL and Open MPI need, and the
    variables of --env, whose values no command line shows. Ctrl-C lets the ranks save and end; a second one ends them
    at once. The exit code is that of the rank that failed first.

    With --restarts the job goes on from its newest checkpoint when a rank, a host or the network fails, without the
    host where that is lost; and with more ranks, up to -np, when hosts come back or the script names new ones.
    """
    import os
    import shlex
    import shutil
    import sys
    from dataclasses import replace

    from hvd_transformer.errors import UserError
    from hvd_transformer.launch import horovodrun_command
    from hvd_transformer.launch.doctor.examine import preflight
    from hvd_transformer.launch.doctor.findings import Job
    from hvd_transformer.launch.horovodrun_command import Horovodrun, check_devices, horovod_library, takes_mpi
    from hvd_transformer.launch.host_pool import HostPool, find_hosts, resolve_min_ranks
    from hvd_transformer.launch.launch_screen import Screen
    from hvd_transformer.launch.scheduler.scheduled_job import ScheduledJob
    from hvd_transformer.launch.ssh import Ssh
    from hvd_transformer.launch.supervisor import LaunchPlan, Supervisor

    if num_ranks is not None and num_ranks < 1:
        raise UserError(f"-np {num_ranks}: must be at least 1")
    if restarts < 0:
        raise UserError(f"--restarts {restarts}: must be 0 or more")
    minimal = horovodrun_command.launcher_environment(os.environ, named)
    worker = worker_of(settings)
    config = worker.config
    tensor = config.parallel.tensor
    find = find_hosts(num_ranks, hosts, hostfile, host_discovery_script, minimal, tensor)
    found = HostPool(find, num_ranks, tensor).hosts()
    min_ranks = resolve_min_ranks(min_ranks, num_ranks, sum(host.slots for host in found), tensor)
    mpi = takes_mpi(gloo, horovod_library())
    horovodrun = Horovodrun(found, mpi, Ssh(ssh_port, ssh_identity), network_interface, timeline, autotune)
    if scheduler is not None or output is not None or image is not None:
        horovodrun_command.check_names(named)  # their values are for the scheduler's side
        job = ScheduledJob(found, _passed_on(click.get_current_context()), named, settings, config, image)
        click.echo(scheduled(scheduler, job, output, dry_run))
        return
    values = horovodrun_command.secret_values(os.environ, named)
    check_devices(found, config, os.environ)
    horovodrun.check_path()

    if dry_run:
        click.echo(shlex.join(horovodrun.words(worker.words)))
        return
    if shutil.which("horovodrun", path=minimal["PATH"]) is None:
        raise UserError("horovodrun: not found; install Horovod, as `make install` does")
    if not no_preflight:
        interface = preflight(Job.of(horovodrun, config, worker.trains), horovodrun.ssh, minimal)
        horovodrun = replace(horovodrun, network_interface=network_interface or interface)
    screen = Screen(restarts, worker.log)
    if screen.terminal:
        values[horovodrun_command.SCREEN] = "launcher"
    plan = LaunchPlan(worker.words, worker.again, values, minimal, restarts, min_ranks, network_interface)
    sys.exit(Supervisor(plan, horovodrun, HostPool(find, num_ranks, tensor), screen).run())


# The scheduler says the hosts; the rest of the command line goes into its file.
_NOT_PASSED_ON = {
    "num_ranks", "hosts", "hostfile", "host_discovery_script", "dry_run", "scheduler", "output", "image", "settings",
}  # fmt: skip


def _passed_on(context: click.Context) -> list[str]:
    """The options of this command line, as words, but for those."""
    words: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name in _NOT_PASSED_ON:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for item in value if parameter.multiple else [value]:
                words += [parameter.opts[0], str(item)]
    return words
