"""horovodrun without two of its flaws: `python -m hvd_transformer.comm.horovodrun …`.

The original imports torch to find out what Horovod was built with, before it starts the ranks. It also does not quote
the path of Python in the command that finds the hosts' network interfaces.
"""

import shlex
import sys
from types import SimpleNamespace
from typing import Any

from horovod.runner import launch
from horovod.runner.driver import driver_service
from horovod.runner.util.remote import get_remote_command


def _remote(command: str, **how: Any) -> str:
    """Quote the command for both shells, the local one and the remote one."""
    words: str = get_remote_command(shlex.quote(command), **how)
    return words


if __name__ == "__main__":
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    driver_service.sys = SimpleNamespace(executable=shlex.quote(sys.executable))
    driver_service.get_remote_command = _remote
    launch.run_commandline()
