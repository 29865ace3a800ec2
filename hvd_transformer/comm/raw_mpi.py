"""MPI's own allreduce through mpi4py, without Horovod: a reference for `bench allreduce`."""

from typing import Any

from torch import Tensor

from hvd_transformer.errors import UserError


def load_mpi() -> Any:
    """The module `mpi4py.MPI`, which finds MPI running: Horovod has started it and ends it.

    Raises `UserError` if mpi4py is missing or was built for another MPI than Horovod.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"mpi4py cannot be imported: {error}") from None
    if not MPI.Is_initialized():
        raise UserError("mpi4py uses another MPI than Horovod")
    return MPI


class RawMpi:
    """A communicator of all ranks, which must run over MPI. `mpi` is the module of `load_mpi`. Collective."""

    def __init__(self, mpi: Any) -> None:
        self._in_place, self._sum = mpi.IN_PLACE, mpi.SUM
        self._communicator: Any = mpi.COMM_WORLD.Dup()  # Horovod's messages stay apart

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum a contiguous CPU tensor over the ranks, in place."""
        self._communicator.Allreduce(self._in_place, tensor.numpy(), self._sum)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._communicator.Free()
