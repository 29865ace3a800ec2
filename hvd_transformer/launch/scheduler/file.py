"""Writes a job's file for a scheduler, and says how it is submitted."""

import shlex
from pathlib import Path

from hvd_transformer.atomic import write_text
from hvd_transformer.errors import UserError
from hvd_transformer.launch.scheduler import compose, kubernetes, slurm
from hvd_transformer.launch.scheduler.job import ScheduledJob

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
