"""Which environment variables a job gets: what horovodrun needs and tunes, and what the user names.

horovodrun writes every variable of its own environment into the command line of each rank, where `ps` shows it to
everyone on the host. So it is given these alone; the values that the user names go to the ranks through a file.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_transformer.errors import UserError

# Tells rank 0 that the launcher draws the progress.
SCREEN = "HVD_TRANSFORMER_SCREEN"
# To find commands, libraries and the user's files; how text looks; where ssh asks for keys. The devices of a user who
# chose some are for the ranks of this host alone: horovodrun does not send that variable to others.
_NAMES = {
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "USER", "TMPDIR",
    "LANG", "TERM", "TZ", "PYTHONUNBUFFERED", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES",
}  # fmt: skip
# Locale, threads a rank, and the tuning variables of Horovod, gloo, NCCL and Open MPI.
_PREFIXES = ("LC_", "OMP_", "MKL_", "HOROVOD_", "NCCL_", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")


def minimal(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The environment of horovodrun; not the variables of `--env`, whatever they are called."""
    result = {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and name not in named
    }
    # The commands beside this Python, also where its virtual environment is not activated.
    commands = Path(sys.executable).parent
    result["PATH"] = f"{commands}{os.pathsep}{environment.get('PATH', os.defpath)}"
    # The same for Open MPI from a Python package: what mpirun starts on other hosts, and where that finds its files.
    if (commands / "orted").exists():
        result.setdefault("OMPI_MCA_orte_launch_agent", str(commands / "orted"))
        result["OPAL_PREFIX"] = str(commands.parent)
    return result


def named_values(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The values of the variables of `--env`.

    Raises `UserError` for one that is not set or no name.
    """
    check_names(named)
    for name in named:
        if name not in environment:
            raise UserError(f"--env {name}: not set in this environment")
    return {name: environment[name] for name in named}


def check_names(named: Sequence[str]) -> None:
    """Raises `UserError` for what is no name of a variable."""
    for name in named:
        if "=" in name:
            name = name.partition("=")[0]
            raise UserError(f"--env {name}=…: takes the name alone; a value on a command line is seen by everyone")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {name!a}: no name of an environment variable")
