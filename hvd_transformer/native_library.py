"""Compiles a C++ file of this package for this machine with its compiler, once, and loads it."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from hvd_transformer.errors import UserError
from hvd_transformer.own_folder import make_own_folder

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared")
_SECONDS = 120.0
_END = b"\nhvd-transformer\n"  # of a kept library: to load one that a crash of the host has cut would be a bus error


class CannotCompile(Exception):
    """Why there is no library on this machine, in one line."""


class _CannotLoad(CannotCompile):
    """The library is there, but cannot be loaded."""


class NativeLibrary(NamedTuple):
    """A C++ file, which may include headers beside it, and the flags to compile it with."""

    source: Path
    flags: Sequence[str] = FLAGS

    def load(self, folder: Path) -> ctypes.CDLL:
        """The compiled library: kept in `folder` if that can be written, compiled anew if not.

        The file's name depends on everything that the machine code depends on, so that hosts can share the folder, and
        ranks that compile at the same time write the same file. Raises `CannotCompile`.
        """
        file = self._file(folder)
        try:
            make_own_folder(folder)
            if not _is_whole(file):
                partial = file.with_name(f".{uuid4().hex}.so")
                try:
                    self._compile(partial)
                    with partial.open("ab") as end:
                        end.write(_END)
                    partial.replace(file)
                finally:
                    partial.unlink(missing_ok=True)
            return self._open(file)
        except (OSError, UserError, _CannotLoad):  # nothing can be kept, or loaded, from there
            with tempfile.TemporaryDirectory() as private:
                file = Path(private) / file.name
                self._compile(file)
                return self._open(file)

    def is_kept(self, folder: Path) -> bool:
        """Whether it has been compiled before, for a machine like this one."""
        try:
            return _is_whole(self._file(folder))
        except OSError:
            return False

    def _file(self, folder: Path) -> Path:
        return folder / f"{self.source.stem}-{self._digest()}.so"

    def _compile(self, file: Path) -> None:
        chosen = os.environ.get("CXX")
        words = shlex.split(chosen) if chosen else [next(filter(shutil.which, ("g++", "c++", "clang++")), "")]
        if not words or shutil.which(words[0]) is None:
            raise CannotCompile(f"CXX={chosen} is not a command" if chosen else "there is no C++ compiler (g++)")
        command = [*words, *self.flags, "-o", str(file), str(self.source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise CannotCompile(f"{words[0]} took longer than {_SECONDS:.0f} seconds") from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise CannotCompile(f"{words[0]}: {next((line for line in lines if 'error' in line), lines[-1])}")

    def _open(self, file: Path) -> ctypes.CDLL:
        try:
            return ctypes.CDLL(str(file))
        except OSError as error:
            raise _CannotLoad(f"the compiled {self.source.stem} cannot be loaded: {error}") from None

    def _digest(self) -> str:
        """Hash of source and headers, the flags, and what -march=native and the C library are here."""
        files = [self.source, *sorted(self.source.parent.glob("*.h"))]
        parts = [file.read_text(encoding="utf-8") for file in files]
        parts += [*self.flags, platform.machine(), *platform.libc_ver()]
        with suppress(OSError):  # Linux only
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            parts += sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _is_whole(file: Path) -> bool:
    try:
        with file.open("rb") as kept:
            kept.seek(-len(_END), os.SEEK_END)
            return kept.read() == _END
    except OSError:  # none, or too short
        return False
