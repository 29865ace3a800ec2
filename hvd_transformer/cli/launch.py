"""`hvd-transformer launch`: runs a job on the ranks of many hosts, through horovodrun."""

import math
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hvd_transformer.atomic import write_text
from hvd_transformer.cli import options
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.config import Config
    from hvd_transformer.launch.horovodrun_command import Horovodrun
    from hvd_transformer.launch.host_pool import HostPool
    from hvd_transformer.launch.scheduler.scheduled_job import ScheduledJob
    from hvd_transformer.launch.time_limits import TimeLimits


_LEAST_SILENCE = 3


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of `launch`: a field per parameter. Raises `UserError` for a number out of range."""

    num_ranks: int | None
    hosts: str | None
    hostfile: Path | None
    gloo: bool | None
    ssh_port: int | None
    ssh_identity: Path | None
    network_interface: str | None
    named: tuple[str, ...]  # of --env
    timeline: Path | None
    autotune: bool
    restarts: int
    min_ranks: int | None
    give_up_seconds: float
    start_timeout: float | None
    silence_timeout: float | None
    save_timeout: float | None
    host_discovery_script: Path | None
    no_preflight: bool
    detach: bool
    dry_run: bool
    scheduler: str | None
    output: Path | None
    image: str | None
    memory_gib: float | None
    settings: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.num_ranks is not None and self.num_ranks < 1:
            raise UserError(f"-np {self.num_ranks}: must be at least 1")
        if self.restarts < 0:
            raise UserError(f"--restarts {self.restarts}: must be 0 or more")
        if self.silence_timeout is not None and self.silence_timeout < _LEAST_SILENCE:
            raise UserError(
                f"--silence-timeout: must be at least {_LEAST_SILENCE} seconds, as hosts report every second"
            )
        if self.memory_gib is not None:
            if self.scheduler != "kubernetes":
                raise UserError("--memory-gib: only with --scheduler kubernetes")
            if not 0 < self.memory_gib < math.inf:
                raise UserError(f"--memory-gib {self.memory_gib:g}: must be above 0")

    def limits(self, num_hosts: int) -> "TimeLimits":
        """How long to wait for so many hosts."""
        from hvd_transformer.launch.time_limits import TimeLimits

        return TimeLimits.of(num_hosts, self.start_timeout, self.silence_timeout, self.save_timeout)

    @property
    def for_scheduler(self) -> bool:
        """Whether a scheduler's job file is to be written."""
        return not (self.scheduler is None and self.output is None and self.image is None)


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
    """The worker for what follows `--`: `evaluate …`, or hvd-train's arguments. Raises `UserError`."""
    return _evaluate(words) if words[:1] == ("evaluate",) else _train(words)


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

    request = Request(given["checkpoint"], given["settings"], given["split"], given["data"], given["trust_task"])
    worker = ["hvd-transformer", *words]
    return Worker(worker, worker, evaluation_config(read_checkpoint(request.checkpoint), request), trains=False)


@click.command()
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
    help="End the job if it has made no new step for so long after a failure.",
)
@options.timeout("--start-timeout", "Time for a host to answer when it is taken in. Default: 30s")
@options.timeout("--silence-timeout", "Time without a word from a host, after which it is lost. Default: 8s")
@options.timeout("--save-timeout", "Time for ranks to save that were asked to stop. Default: 2m")
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
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[-- [evaluate] ARGUMENTS...]")
def launch(**given: Any) -> None:
    """Run hvd-train on every slot of the hosts. Its arguments follow `--` and are checked before anything starts.

    `hvd-transformer launch -np 4 -H h1:2,h2:2 -- --preset python-docs output_dir=runs/four`

    To run `hvd-transformer evaluate` instead, put that word first: `… -- evaluate runs/four --split valid`.

    The ranks inherit the environment variables that commands, locale, threads, Horovod, NCCL and Open MPI need, and
    those named by --env, whose values appear on no command line. Ctrl-C lets the ranks save and exit; a second Ctrl-C
    kills them. The exit code is that of the rank that failed first.

    With --restarts the job resumes from its newest checkpoint after a rank, a host or the network fails, without hosts
    that are lost, keep failing or cannot run it, if the others have slots for --min-np ranks. It restarts with more
    ranks, up to -np, when hosts return or the discovery script names new ones.
    """
    from hvd_transformer.launch.horovodrun_command import Horovodrun, horovod_library, launcher_environment, takes_mpi
    from hvd_transformer.launch.host_pool import HostPool, find_hosts, resolve_min_ranks
    from hvd_transformer.launch.ssh import Ssh

    chosen = LaunchOptions(**given)
    environment = launcher_environment(os.environ, chosen.named)
    worker = worker_of(chosen.settings)
    tensor = worker.config.parallel.tensor
    script = chosen.host_discovery_script
    find = find_hosts(chosen.num_ranks, chosen.hosts, chosen.hostfile, script, environment, tensor)
    pool = HostPool(find, chosen.num_ranks, tensor)
    hosts = pool.hosts()
    min_ranks = resolve_min_ranks(chosen.min_ranks, chosen.num_ranks, sum(host.slots for host in hosts), tensor)
    horovodrun = Horovodrun(
        hosts,
        mpi=takes_mpi(chosen.gloo, horovod_library(), chosen.num_ranks or sum(host.slots for host in hosts)),
        ssh=Ssh(chosen.ssh_port, chosen.ssh_identity),
        network_interface=chosen.network_interface,
        timeline=chosen.timeline,
        autotune=chosen.autotune,
    )
    if chosen.for_scheduler:
        click.echo(_scheduled(chosen, horovodrun, worker.config))
    else:
        _run(chosen, worker, horovodrun, pool, min_ranks, environment)


def _run(
    chosen: LaunchOptions,
    worker: Worker,
    horovodrun: "Horovodrun",
    pool: "HostPool",
    min_ranks: int,
    environment: dict[str, str],
) -> None:
    """Check what can be checked from here, then run the job and exit with its code, unless this is a dry run."""
    from hvd_transformer.launch.connections import HostConnections
    from hvd_transformer.launch.detach import is_detached
    from hvd_transformer.launch.doctor.examine import Admission
    from hvd_transformer.launch.doctor.findings import Job
    from hvd_transformer.launch.horovodrun_command import check_devices, secret_values
    from hvd_transformer.launch.launch_output import LaunchOutput
    from hvd_transformer.launch.launch_screen import Screen
    from hvd_transformer.launch.launched_job import LaunchedJob
    from hvd_transformer.launch.limits import warn_of_gloo
    from hvd_transformer.launch.restart_policy import Limits
    from hvd_transformer.launch.supervisor import LaunchPlan, Supervisor
    from hvd_transformer.reporting.progress import SCREEN

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
    plan = LaunchPlan(
        worker.words, worker.again, values, environment, Limits(chosen.restarts, chosen.give_up_seconds), min_ranks
    )
    limits = chosen.limits(len(horovodrun.hosts))
    with ExitStack() as stack:
        job = None if worker.run is None else stack.enter_context(LaunchedJob(worker.run))
        output = LaunchOutput(screen, job)
        stack.enter_context(closing(output))
        connections = stack.enter_context(closing(HostConnections(horovodrun.ssh, environment, limits)))
        asked = Job.of(horovodrun, worker.config, worker.trains)
        examine = None if chosen.no_preflight else Admission(asked, connections, environment).refused
        supervisor = Supervisor(plan, horovodrun, pool, connections, output, examine)
        if job is None:
            code = supervisor.run()
        else:
            job.watch(supervisor)
            code = job.code = supervisor.run()
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


def _scheduled(chosen: LaunchOptions, horovodrun: "Horovodrun", config: "Config") -> str:
    """Write the job file for the scheduler and return the line that says how to submit it.

    With --dry-run, write nothing and return the text of the file. Raises `UserError` if the file cannot express
    the job, exists already or cannot be written.
    """
    from hvd_transformer.launch.horovodrun_command import check_names
    from hvd_transformer.launch.scheduler import compose, kubernetes, slurm
    from hvd_transformer.launch.scheduler.scheduled_job import ScheduledJob

    check_names(chosen.named)  # their values are set where the job file is submitted
    if chosen.scheduler is None:
        raise UserError("--output and --image: only with --scheduler")
    words = _passed_on(click.get_current_context())
    save_seconds = math.ceil(chosen.limits(len(horovodrun.hosts)).save)
    job = ScheduledJob(horovodrun.hosts, words, chosen.named, chosen.settings, config, save_seconds, chosen.image)
    if chosen.scheduler == "kubernetes":
        job = replace(job, worker_bytes=_worker_bytes(chosen.memory_gib, job))
    name, make, submit = {
        "slurm": (slurm.NAME, slurm.script, "sbatch {}"),
        "kubernetes": (kubernetes.NAME, kubernetes.manifest, "kubectl apply -f {}"),
        "compose": (compose.NAME, compose.services, "docker compose -f {} run --rm launcher"),
    }[chosen.scheduler]
    content = make(job)
    if chosen.dry_run:
        return content.rstrip("\n")
    if chosen.output is None:
        raise UserError(f"--scheduler {chosen.scheduler}: needs --output, the folder for its file")
    file = chosen.output / name
    if file.exists():
        raise UserError(f"{file}: already exists; remove it or choose another --output")
    try:
        chosen.output.mkdir(parents=True, exist_ok=True)
        write_text(file, content)
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None
    return f"{file}: written; submit it with: {submit.format(shlex.quote(str(file)))}"


def _worker_bytes(memory_gib: float | None, job: "ScheduledJob") -> int:
    """The memory of each worker, without /dev/shm: as given, or as the plan has it."""
    if memory_gib is not None:
        return int(memory_gib * 2**30)
    from hvd_transformer.planning.host_memory import host_memory

    return job.slots * host_memory(job.config, sum(host.slots for host in job.hosts))


# The scheduler chooses the hosts; all other options go into its job file.
_NOT_PASSED_ON = {
    "num_ranks", "hosts", "hostfile", "host_discovery_script", "dry_run", "scheduler", "output", "image",
    "memory_gib", "settings",
}  # fmt: skip


def _passed_on(context: click.Context) -> list[str]:
    """The words of this command line that go into a scheduler's job file."""
    words: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in _NOT_PASSED_ON or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for item in value if parameter.multiple else [value]:
                words += [parameter.opts[0], str(item)]
    return words
