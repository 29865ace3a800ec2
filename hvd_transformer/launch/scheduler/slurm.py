"""A batch script for Slurm's sbatch, from the template job.sbatch.

Source: sbatch(1) and scontrol(1) of Slurm. Nodes reach each other by ssh, which pam_slurm_adopt allows within a job.
"""

import shlex
import sys
from importlib import resources
from pathlib import Path

from hvd_transformer.errors import STALLED
from hvd_transformer.launch.scheduler.scheduled_job import ScheduledJob

NAME = "job.sbatch"
_TEMPLATE = resources.files("hvd_transformer.launch.scheduler") / NAME
_END_SECONDS = 60  # after the save: for the launcher to end and the job to be queued again
_REQUEUES = 3  # in a row without a new checkpoint
_HOSTS = "\0"  # stands for the hosts; no real argument can be this


def script(job: ScheduledJob) -> str:
    """The text of the script. Raises `UserError` if the hosts' slots differ."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={len(job.hosts)}",
        f"--ntasks-per-node={job.slots}",
        f"--cpus-per-task={job.cores_per_rank}",
        *([f"--gpus-per-node={job.slots * job.gpus_per_rank}"] if job.gpus_per_rank else []),
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.save_seconds + _END_SECONDS}",
        "--export=ALL",
    ]
    # The hosts are known when the job runs: the shell expands them; everything else is quoted.
    words = job.launch("-H", _HOSTS)
    at = words.index(_HOSTS)
    launch = f'{shlex.join(words[:at])} "$hosts" {shlex.join(words[at + 1 :])}'.rstrip()
    if job.config.checkpoint.resume == "never":  # holds for the first start, not for those after a requeue
        launch += " ${SLURM_RESTART_COUNT:+checkpoint.resume=auto}"
    return _TEMPLATE.read_text(encoding="utf-8").format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        commands=shlex.quote(str(Path(sys.executable).parent)),
        slots=job.slots,
        run=shlex.quote(str(Path(job.config.output_dir).expanduser())),
        requeues=_REQUEUES,
        try_again=STALLED,
        launch=launch,
    )
