"""Compiles and loads `cpp/kernels.cpp`, which `kernels.py` calls."""

import ctypes
import platform
from pathlib import Path

from torch import Tensor

from hvd_transformer.native_library import CannotCompile as CannotCompile
from hvd_transformer.native_library import NativeLibrary

# Without -ffast-math, which would break infinities and NaN. torch has loaded the same OpenMP library already.
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
_LIBRARY = NativeLibrary(Path(__file__).with_name("cpp") / "kernels.cpp", FLAGS)


def load_library(folder: Path) -> ctypes.CDLL:
    """Load the compiled kernels from `folder`, where they are compiled first if necessary. Raises `CannotCompile`."""
    return _LIBRARY.load(folder)


def address(tensor: Tensor | None) -> int | None:
    """Where the values of a tensor are, for the kernels; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()
