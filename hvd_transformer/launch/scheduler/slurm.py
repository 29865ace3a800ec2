"""A batch script for Slurm's sbatch.

Source: sbatch(1) and scontrol(1) of Slurm. Nodes reach each other by ssh, which pam_slurm_adopt allows within a job.
"""

import shlex
import sys
from pathlib import Path

from hvd_transformer.launch.scheduler.scheduled_job import SAVE_SECONDS, ScheduledJob

NAME = "job.sbatch"


def script(job: ScheduledJob) -> str:
    """The script's text. Raises `UserError` where the hosts' slots differ."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={len(job.hosts)}",
        f"--ntasks-per-node={job.slots}",
        f"--cpus-per-task={job.cores_per_rank}",
        *([f"--gpus-per-node={job.slots * job.gpus_per_rank}"] if job.gpus_per_rank else []),
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SAVE_SECONDS}",
        "--export=ALL",
    ]
    # The hosts are known when the job runs: the shell puts them in, where everything else is quoted.
    before, after = (shlex.join(part) for part in _split(job.launch("-H", _HOSTS), _HOSTS))
    return _TEXT.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        commands=shlex.quote(str(Path(sys.executable).parent)),
        slots=job.slots,
        launch=f'{before} "$hosts" {after}'.rstrip(),
    )


_HOSTS = "\0"  # no argument can be this


def _split(words: list[str], at: str) -> tuple[list[str], list[str]]:
    return words[: words.index(at)], words[words.index(at) + 1 :]


_TEXT = """\
#!/usr/bin/env bash
#
# Written by hvd-transformer launch --scheduler slurm. What your site wants besides, and what is to be otherwise than
# here, goes before the file's name:
#
#   sbatch --partition=NAME --time=24:00:00 job.sbatch
#
{options}
set -euo pipefail

PATH={commands}:$PATH
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:{slots}/' | paste -s -d , -)

{launch} &
launcher=$!

# Either way the ranks save and end. USR1: the time is nearly over, so the job goes on when its turn comes again.
# TERM: scancel, and it does not.
again=
trap 'again=yes; kill -TERM "$launcher"' USR1
trap 'kill -TERM "$launcher"' TERM
while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher" || true # also ended by a signal
done
code=0
wait "$launcher" || code=$?
if [ -n "$again" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
