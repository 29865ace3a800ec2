"""Job files for schedulers: what `hvd-transformer launch --scheduler` writes instead of starting the job."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

import click

from hvd_transformer.atomic import write_text
from hvd_transformer.cli import options
from hvd_transformer.cli.launch_options import LaunchOptions
from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch.horovodrun_command import check_names
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.scheduler import compose, kubernetes, slurm
from hvd_transformer.launch.scheduler.scheduled_job import ScheduledJob


def write_job_file(chosen: LaunchOptions, hosts: Sequence[Host], config: Config) -> str:
    """Write the job file for the scheduler and return the line that says how to submit it.

    With --dry-run, write nothing and return the text of the file. Raises `UserError` if the file cannot express
    the job, exists already or cannot be written.
    """
    if chosen.scheduler is None:
        raise UserError("--output and --image: only with --scheduler")
    content = job_file(click.get_current_context(), chosen, hosts, config)
    name, submit = {
        "slurm": (slurm.NAME, "sbatch {}"),
        "kubernetes": (kubernetes.NAME, "kubectl apply -f {}"),
        "compose": (compose.NAME, "docker compose -f {} run --rm launcher"),
    }[chosen.scheduler]
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


def job_file(
    context: click.Context, chosen: LaunchOptions, hosts: Sequence[Host], config: Config, name: str | None = None
) -> str:
    """The text of the job file for a command line of `launch`, `context`, with the scheduler that it names.

    `name`: of the job there. Default: that of the run directory. Raises `UserError` if the file cannot express the job.
    """
    assert chosen.scheduler is not None
    check_names(chosen.named)  # their values are set where the job file is submitted
    words = options.passed_on(context, without=_NOT_PASSED_ON)
    save_seconds = math.ceil(chosen.limits(len(hosts)).save)
    job = ScheduledJob(hosts, words, chosen.named, chosen.settings, config, save_seconds, chosen.image, given_name=name)
    if chosen.scheduler == "kubernetes":
        job = replace(job, worker_bytes=_worker_bytes(chosen.memory_gib, job))
    make = {"slurm": slurm.script, "kubernetes": kubernetes.manifest, "compose": compose.services}
    return make[chosen.scheduler](job)


def _worker_bytes(memory_gib: float | None, job: ScheduledJob) -> int:
    """The memory of each worker, without /dev/shm: as given, or as the plan has it."""
    return planned_bytes(job.config, job.hosts) if memory_gib is None else int(memory_gib * 2**30)


def planned_bytes(config: Config, hosts: Sequence[Host]) -> int:
    """The memory of each worker, without /dev/shm. Raises `UserError` if the model cannot be planned."""
    from hvd_transformer.planning.host_memory import host_memory  # imports torch

    return hosts[0].slots * host_memory(config, sum(host.slots for host in hosts))


# The scheduler chooses the hosts; all other options go into its job file.
_NOT_PASSED_ON = {
    "num_ranks", "hosts", "hostfile", "host_discovery_script", "dry_run", "scheduler", "output", "image",
    "memory_gib", "settings",
}  # fmt: skip
