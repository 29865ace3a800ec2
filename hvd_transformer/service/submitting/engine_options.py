"""What is wrong in a job for Slurm or Kubernetes, whatever its configuration is."""

import shutil
from collections.abc import Sequence

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Engine

COMMANDS = {Engine.SLURM: ("sbatch", "squeue", "scancel"), Engine.KUBERNETES: ("kubectl",)}

# The others are the service's and the job file's own, or would make several jobs of one.
_SBATCH = (
    "account", "constraint", "cpus-per-task", "exclude", "exclusive", "gres", "licenses", "mem",
    "mem-per-cpu", "mem-per-gpu", "nice", "nodelist", "partition", "qos", "reservation", "switches",
)  # fmt: skip


def check_engine(engine: Engine, sbatch: Sequence[str]) -> None:
    """Raise `UserError` if this machine cannot send jobs to the engine, or for options that its jobs cannot have."""
    for command in COMMANDS.get(engine, ()):
        if shutil.which(command) is None:
            raise UserError(f"--engine {engine.value}: the service's machine has no command {command}")
    for option in sbatch:
        if engine is not Engine.SLURM:
            raise UserError(f"--sbatch {option}: only with --engine slurm")
        name = option.partition("=")[0]
        if name.removeprefix("--") not in _SBATCH or not name.startswith("--"):
            allowed = ", ".join(f"--{known}" for known in _SBATCH)
            raise UserError(f"--sbatch {option}: must be one of {allowed}, with =VALUE if it has one")
