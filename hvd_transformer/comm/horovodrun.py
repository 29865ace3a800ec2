"""horovodrun, for a launcher that knows what Horovod was built with: `python -m hvd_transformer.comm.horovodrun …`.

horovodrun itself finds out by importing torch, and only then starts the ranks, which all do the same.
"""

from horovod.runner import launch


def _built(verbose: bool = False) -> bool:
    return True


if __name__ == "__main__":
    launch.gloo_built = launch.mpi_built = _built
    launch.run_commandline()
