"""horovodrun, for a launcher that knows what Horovod was built with: `python -m hvd_transformer.comm.horovodrun …`.

horovodrun itself finds out by importing torch, and only then starts the ranks, which all do the same. And it puts the
path of Python unquoted into the command that looks for the hosts' network interfaces.
"""

import shlex
import sys
from types import SimpleNamespace

from horovod.runner import launch
from horovod.runner.driver import driver_service


def _built(verbose: bool = False) -> bool:
    return True


if __name__ == "__main__":
    launch.gloo_built = launch.mpi_built = _built
    driver_service.sys = SimpleNamespace(executable=shlex.quote(sys.executable))
    launch.run_commandline()
