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
    check_names(chosen.named)  # their values are set where the job file is submitted
    if chosen.scheduler is None:
        raise UserError("--output and --image: only with --scheduler")
    words = options.passed_on(click.get_current_context(), without=_NOT_PASSED_ON)
    save_seconds = math.ceil(chosen.limits(len(hosts)).save)
    job = ScheduledJob(hosts, words, chosen.named, chosen.settings, config, save_seconds, chosen.image)
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


def _worker_bytes(memory_gib: float | None, job: ScheduledJob) -> int:
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
