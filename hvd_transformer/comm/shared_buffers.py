"""Memory that the other ranks of the host can map: Horovod reduces tensors there without copies.

docker/patches/within_host.patch has the other side. Published Horovod has no such memory.
"""

import ctypes
import weakref
from types import ModuleType

import torch
from torch import Tensor


class SharedBuffers:
    """This process's buffers, and what it uses of the other ranks'."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._allocate = library.horovod_shared_buffer_allocate
        self._allocate.restype, self._allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._free = library.horovod_shared_buffer_free
        self._free.restype, self._free.argtypes = None, [ctypes.c_void_p]
        self._of_others = library.horovod_shared_bytes_of_others
        self._of_others.restype, self._of_others.argtypes = ctypes.c_size_t, []

    @classmethod
    def find(cls, horovod: ModuleType) -> "SharedBuffers | None":
        """Those of a Horovod built by docker/build_horovod.sh; None: this one has none."""
        try:
            return cls(horovod.mpi_ops._basics.MPI_LIB_CTYPES)
        except AttributeError:
            return None

    @property
    def bytes_of_others(self) -> int:
        """What this process uses of other ranks' buffers: its resident set counts it, too."""
        return int(self._of_others())

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Contiguous zeros of the shape and dtype of a CPU tensor; plain memory where the system has no other."""
        address = self._allocate(tensor.nbytes) if tensor.nbytes else None
        if address is None:
            return torch.zeros_like(tensor)
        memory = (ctypes.c_char * tensor.nbytes).from_address(address)
        # The tensor's storage keeps `memory`.
        weakref.finalize(memory, self._free, address).atexit = False
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
