"""`hvd-transformer launch`: runs a job on the ranks of many hosts, through horovodrun."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_transformer.cli import options
from hvd_transformer.cli.exit_file import ExitFile
from hvd_transformer.cli.launch_options import LaunchOptions
from hvd_transformer.errors import UserError
from hvd_transformer.folder_lock import JOB

if TYPE_CHECKING:
    from hvd_transformer.config import Config
    from hvd_transformer.launch.horovodrun_command import Horovodrun
    from hvd_transformer.launch.host_pool import HostPool


@dataclass(frozen=True)
class Worker:
    """What every rank runs: `words` at the first start, `again` at a restart. `trains`: it writes a run directory."""

    words: list[str]
    again: list[str]
    config: "Config"
    trains: bool

    @property
    def run(self) -> Path | None:
        """The run directory, if it writes one."""
        return Path(self.config.output_dir).expanduser() if self.trains else None


def worker_of(words: Sequence[str]) -> Worker:
    """The worker for what follows `--`: `evaluate …`, `bench …`, or hvd-train's arguments. Raises `UserError`."""
    if words[:1] == ("evaluate",):
        return _evaluate(words)
    return _bench(words) if words[:1] == ("bench",) else _train(words)


def _train(words: Sequence[str]) -> Worker:
    from hvd_transformer.cli.train import config_of

    config = config_of(words)
    worker = ["hvd-train", *words]
    again = [*worker, "checkpoint.resume=auto"] if config.checkpoint.resume == "never" else worker
    return Worker(worker, again, config, trains=True)


def _evaluate(words: Sequence[str]) -> Worker:
    from hvd_transformer.cli.evaluate import check, evaluate

    given = evaluate.make_context("evaluate", list(words[1:])).params
    check(given["checkpoint"], given["settings"])
    from hvd_transformer.checkpoint.saved_run import read_checkpoint
    from hvd_transformer.training.evaluate_job import Request, evaluation_config

    trusts = given["trust_task"], given["kept_code"]
    request = Request(given["checkpoint"], given["settings"], given["split"], given["data"], *trusts)
    worker = ["hvd-transformer", *words]
    return Worker(worker, worker, evaluation_config(read_checkpoint(request.checkpoint), request), trains=False)


def _bench(words: Sequence[str]) -> Worker:
    from hvd_transformer.cli.bench import config_of

    worker = ["hvd-transformer", *words]
    return Worker(worker, worker, config_of(words[1:]), trains=False)


@click.command(cls=options.WithJobArguments)
@click.option("-np", "num_ranks", type=int, metavar="N", help="Number of ranks. Default: one per slot of the hosts.")
@options.hosts
@options.hostfile
@click.option(
    "--gloo/--mpi",
    default=None,
    help="Communication library. MPI must be the same on all hosts. Default: gloo, if Horovod was built with it.",
)
@options.ssh_port
@options.ssh_identity
@options.network_interface
@click.option("--env", "named", multiple=True, metavar="NAME", help="Variable to pass to the ranks; repeatable.")
@click.option("--timeline", type=options.PATH, metavar="FILE", help="Write Horovod's timeline to FILE.")
@click.option("--autotune", is_flag=True, help="Let Horovod tune its fusion threshold and cycle time.")
@click.option(
    "--restarts", type=int, default=0, metavar="N", help="Resume from the last checkpoint after up to N failures."
)
@click.option(
    "--min-np",
    "min_ranks",
    type=int,
    metavar="N",
    help="Fewest ranks to run with, without hosts that fail. Default: -np.",
)
@click.option(
    "--give-up-after",
    "give_up_seconds",
    type=options.Seconds(),
    default="30m",
    show_default=True,
    metavar="TIME",
    help="End the job if it has made no new step for so long after a failure or without a host that left.",
)
@options.timeout("--start-timeout", "Time for a new host to answer. Default: 30s, 6s in the preflight")
@options.timeout("--silence-timeout", "Time after which a host that sends nothing counts as lost. Default: 8s")
@options.timeout("--save-timeout", "Time for ranks to save after a request to stop. Default: 2m")
@click.option(
    "--host-discovery-script",
    type=options.PATH,
    metavar="FILE",
    help="Script that prints the available hosts, one per line; it is called repeatedly.",
)
@click.option("--no-preflight", is_flag=True, help="Do not check the hosts first (see `hvd-transformer doctor`).")
@click.option(
    "--detach", is_flag=True, help="Let the job run on without this terminal once its ranks run: see `attach`."
)
@click.option("--dry-run", is_flag=True, help="Print the horovodrun command without starting it.")
@click.option(
    "--scheduler",
    type=click.Choice(["slurm", "kubernetes", "compose"]),
    help="Write a job file for this scheduler instead of starting the job.",
)
@click.option("--output", type=options.PATH, metavar="DIR", help="Folder for the job file of --scheduler.")
@click.option(
    "--image",
    metavar="NAME",
    help="Container image for --scheduler. Default: hvd-transformer:cpu, or hvd-transformer:gpu for CUDA.",
)
@click.option(
    "--memory-gib",
    type=float,
    metavar="N",
    help="Memory per worker to request with --scheduler kubernetes. Default: what `plan` estimates.",
)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[-- [evaluate|bench] ARGUMENTS...]")
def launch(**given: Any) -> None:
    """Run hvd-train on every slot of the hosts. Its arguments follow `--` and are checked before anything starts.

    `hvd-transformer launch -np 4 -H h1:2,h2:2 -- --preset python-docs output_dir=runs/four`

    To run `hvd-transformer evaluate` or `bench` instead, put that word first: `… -- evaluate runs/four --split valid`,
    `… -- bench allreduce`.

    The ranks inherit the environment variables that commands, locale, threads, Horovod, NCCL and Open MPI need, and
    those named by --env, whose values appear on no command line. Ctrl-C lets the ranks save and exit; a second Ctrl-C
    kills them. The exit code is that of the rank that failed first.

    With --restarts the job resumes from its newest checkpoint after a rank, a host or the network fails, without hosts
    that are lost, keep failing or cannot run it, if the others have slots for --min-np ranks. It restarts with more
    ranks, up to -np, when hosts return or the discovery script names new ones or more slots.
    """
    with ExitFile() as exit_file:
        _launch(LaunchOptions(**given), exit_file)


def _launch(chosen: LaunchOptions, exit_file: ExitFile) -> None:
    """Check the command line and its hosts, then run the job or write its job file."""
    from hvd_transformer.config.batch_size import check_step_size
    from hvd_transformer.launch.connection.ssh import Ssh
    from hvd_transformer.launch.horovodrun_command import Horovodrun, horovod_library, launcher_environment, takes_mpi
    from hvd_transformer.launch.host_pool import HostPool, find_hosts, resolve_min_ranks

    environment = launcher_environment(os.environ, chosen.named)
    worker = worker_of(chosen.settings)
    tensor = worker.config.parallel.tensor
    script = chosen.host_discovery_script
    find = find_hosts(chosen.num_ranks, chosen.hosts, chosen.hostfile, script, os.environ, tensor)
    pool = HostPool(find, chosen.num_ranks, tensor)
    hosts = pool.hosts()
    slots = sum(host.slots for host in hosts)
    min_ranks = resolve_min_ranks(chosen.min_ranks, chosen.num_ranks, slots, tensor)
    check_step_size(worker.config, (chosen.num_ranks or slots) // tensor)
    horovodrun = Horovodrun(
        hosts,
        mpi=takes_mpi(chosen.gloo, horovod_library(), chosen.num_ranks or slots),
        ssh=Ssh(chosen.ssh_port, chosen.ssh_identity),
        network_interface=chosen.network_interface,
        timeline=chosen.timeline,
        autotune=chosen.autotune,
    )
    if chosen.for_scheduler:
        from hvd_transformer.cli.job_file import write_job_file

        click.echo(write_job_file(chosen, horovodrun.hosts, worker.config))
    else:
        _run(chosen, worker, horovodrun, pool, min_ranks, environment, exit_file)


def _run(
    chosen: LaunchOptions,
    worker: Worker,
    horovodrun: "Horovodrun",
    pool: "HostPool",
    min_ranks: int,
    environment: dict[str, str],
    exit_file: ExitFile,
) -> None:
    """Check what can be checked from here, then run the job and exit with its code, unless this is a dry run."""
    from hvd_transformer.config.schema import check_new_run
    from hvd_transformer.launch.connection.connections import HostConnections
    from hvd_transformer.launch.detach import is_detached
    from hvd_transformer.launch.doctor.examine import Admission
    from hvd_transformer.launch.doctor.findings import Job
    from hvd_transformer.launch.horovodrun_command import check_devices, gpus_per_rank, secret_values
    from hvd_transformer.launch.launched_job import LaunchedJob
    from hvd_transformer.launch.limits import warn_of_gloo
    from hvd_transformer.launch.output.launch_output import LaunchOutput
    from hvd_transformer.launch.output.launch_screen import Screen
    from hvd_transformer.launch.restart_policy import Limits
    from hvd_transformer.launch.supervisor import LaunchPlan, Supervisor
    from hvd_transformer.reporting.progress import SCREEN

    if worker.run is not None:  # a restart may resume: from checkpoints of this job alone
        check_new_run(worker.config.checkpoint.resume, worker.run)
    values = secret_values(os.environ, chosen.named)
    check_devices(horovodrun.hosts, worker.config, os.environ)
    horovodrun.check_path()
    if chosen.dry_run:
        click.echo(shlex.join(horovodrun.words(worker.words)))
        return
    if chosen.gloo:
        warn_of_gloo(horovodrun.num_ranks)
    if find_spec("horovod") is None:
        raise UserError("Horovod: not found; install it, as `make install` does")
    if chosen.detach and not is_detached():
        _detach(worker)
    screen = Screen(False if is_detached() else None)
    if screen.terminal:
        values[SCREEN] = "launcher"
    allowed = Limits(chosen.restarts, chosen.give_up_seconds)
    job_name = os.environ.pop(JOB, "")
    plan = LaunchPlan(worker.words, worker.again, values, environment, allowed, min_ranks, job_name)
    limits = chosen.limits(len(horovodrun.hosts))
    with ExitStack() as stack:
        job = None if worker.run is None else stack.enter_context(LaunchedJob(worker.run))
        output = LaunchOutput(screen, job, gpus_per_rank(worker.config))
        stack.enter_context(closing(output))
        connections = stack.enter_context(closing(HostConnections(horovodrun.ssh, environment, limits)))
        asked = Job.of(horovodrun, worker.config, worker.trains)
        examine = None if chosen.no_preflight else Admission(asked, connections, environment).refused
        supervisor = Supervisor(plan, horovodrun, pool, connections, output, examine)
        exit_file.watch(supervisor.how)
        if job is None:
            code = supervisor.run()
        else:
            job.watch(supervisor)
            code = job.code = supervisor.run()
    if output.blocked:
        exit_file.leave(code)
    sys.exit(code)


def _detach(worker: Worker) -> None:
    """Start the same command without a terminal and exit. Raises `UserError` if there is nothing to attach to."""
    from hvd_transformer.launch.detach import detach

    if worker.run is None:
        raise UserError("--detach: only for training, which has a run directory to attach to")
    code = detach(sys.argv[1:])
    if code is None:
        run = shlex.quote(str(worker.run))
        click.echo(f"{worker.run}: the job runs on without this terminal")
        click.echo(f"  see it:   hvd-transformer attach {run}\n  stop it:  hvd-transformer stop {run}")
    sys.exit(code or 0)
