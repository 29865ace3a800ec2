"""horovodrun, for a launcher that knows what Horovod was built with: `python -m hvd_transformer.comm.horovodrun …`.

horovodrun itself finds out by importing torch, and only then starts the ranks, which all do the same. And it puts the
path of Python unquoted into the command that looks for the hosts' network interfaces.
"""

import shlex
import sys
from types import SimpleNamespace
from typing import Any

from horovod.runner import launch
from horovod.runner.driver import driver_service
from horovod.runner.util.remote import get_remote_command


def _built(verbose: bool = False) -> bool:
    return True


def _remote(command: str, **how: Any) -> str:
    """For the shell here and the one there."""
    words: str = get_remote_command(shlex.quote(command), **how)
    return words


if __name__ == "__main__":
    launch.gloo_built = launch.mpi_built = _built
    driver_service.sys = SimpleNamespace(executable=shlex.quote(sys.executable))
    driver_service.get_remote_command = _remote
    launch.run_commandline()
