"""Compiles `kernels.cpp` for this machine with its C++ compiler, once, and loads it."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from hvd_transformer.errors import UserError
from hvd_transformer.own_folder import make_own_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
# Not -ffast-math: infinities and NaN keep their meaning. torch has loaded the same OpenMP library already.
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
_SECONDS = 120.0


class CannotCompile(Exception):
    """Why there are no kernels on this machine, in one line."""


def load_library(folder: Path) -> ctypes.CDLL:
    """The compiled kernels: kept in `folder` if that can be written, compiled anew if not.

    The file's name depends on everything that the machine code depends on, so that hosts can share the folder, and
    ranks that compile at the same time write the same file. Raises `CannotCompile`.
    """
    file = folder / f"kernels-{_digest()}.so"
    try:
        make_own_folder(folder)
        if not file.exists():
            partial = file.with_name(f".{uuid4().hex}.so")
            try:
                _compile(partial)
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)
        return _load(file)
    except (OSError, UserError):  # nothing can be kept there
        with tempfile.TemporaryDirectory() as private:
            file = Path(private) / file.name
            _compile(file)
            return _load(file)


def _compile(file: Path) -> None:
    chosen = os.environ.get("CXX")
    words = shlex.split(chosen) if chosen else [next(filter(shutil.which, ("g++", "c++", "clang++")), "")]
    if not words or shutil.which(words[0]) is None:
        raise CannotCompile(f"CXX={chosen} is not a command" if chosen else "there is no C++ compiler (g++)")
    command = [*words, *FLAGS, "-o", str(file), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise CannotCompile(f"{words[0]} took longer than {_SECONDS:.0f} seconds") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CannotCompile(f"{words[0]}: {next((line for line in lines if 'error' in line), lines[-1])}")


def _load(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise CannotCompile(f"the compiled kernels cannot be loaded: {error}") from None


def _digest() -> str:
    """Of the source and the flags, and of what -march=native and the C library are here."""
    parts = [SOURCE.read_text(encoding="utf-8"), *FLAGS, platform.machine(), *platform.libc_ver()]
    with suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        parts += sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
