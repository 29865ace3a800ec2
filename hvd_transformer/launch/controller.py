"""Which of Horovod's two controllers a job's ranks meet through: gloo or MPI."""

import mmap
from importlib.util import find_spec
from pathlib import Path

from hvd_transformer.errors import UserError

# What the compiled library holds where it was built with them. To ask Horovod itself takes torch, and seconds.
_MARKS = {"gloo": b"_ZN4gloo9transport", "mpi": b"MPI_Init_thread"}


def takes_mpi(gloo: bool | None, library: Path | None) -> bool:
    """Whether MPI it is. None: gloo where Horovod's `library` has it, as it needs nothing on the hosts but ssh.

    Raises `UserError` where the library was built without the wanted one.
    """
    built = built_with(library) if library else {"gloo", "mpi"}
    if gloo is None:
        return built == {"mpi"}
    wanted = "gloo" if gloo else "mpi"
    if wanted not in built:
        other = f"use --{min(built)}, or build it again" if built else "build it again"
        raise UserError(f"--{wanted}: Horovod was built without it here; {other}, as `make install` does")
    return not gloo


def built_with(library: Path) -> set[str]:
    """Of "gloo" and "mpi"."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {name for name, mark in _MARKS.items() if data.find(mark) >= 0}


def horovod_library() -> Path | None:
    """Horovod's compiled part for torch, without importing it."""
    package = find_spec("horovod")
    folders = package.submodule_search_locations if package else None
    return next((file for folder in folders or () for file in Path(folder).glob("torch/mpi_lib*.so")), None)
