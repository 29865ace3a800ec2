"""The files of a job's spool folder: the hosts of its allocation, and what each of its attempts leaves there.

hosts      the host file of the allocation
discover   a script that prints it, for elastic jobs
N.lock     locked by the launcher of attempt N for its whole life; has its process number
N.begun    has "!" once its ranks run
N.out      what it has printed until then
N.exit     how it ended (`cli/exit_file.py`)

The lock is the kernel's (flock) on a descriptor that the launcher inherits. So it tells for certain whether a launcher
lives, also to a service that was started after it.
"""

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.service.jobs import Allocation
from hvd_transformer.service.outcome import Exit

_LAST_BYTES = 1 << 14  # of the output, in which its last line is looked for
_LINE = 500  # characters of that line


@dataclass(frozen=True)
class AttemptFiles:
    """The files of attempt `number` in the spool folder of its job."""

    folder: Path
    number: int

    @property
    def lock(self) -> Path:
        """Has the launcher's process number."""
        return self.folder / f"{self.number}.lock"

    @property
    def begun(self) -> Path:
        """Has "!" once the ranks run."""
        return self.folder / f"{self.number}.begun"

    @property
    def out(self) -> Path:
        """The launcher's output until then."""
        return self.folder / f"{self.number}.out"

    @property
    def exit(self) -> Path:
        """How the launcher ended."""
        return self.folder / f"{self.number}.exit"

    def take_lock(self) -> int:
        """Create the lock and take it; returns its descriptor.

        Raises `FileExistsError` if this attempt was started before: no launcher is ever started twice.
        """
        descriptor = os.open(self.lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def is_held(self) -> bool:
        """Whether the launcher lives."""
        try:
            with self.lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def pid(self) -> int | None:
        """The launcher's process; None until it has one."""
        with suppress(OSError, ValueError):
            return int(self.lock.read_text(encoding="ascii"))
        return None

    def has_begun(self) -> bool:
        """Whether the ranks run, or ran."""
        try:
            return self.begun.stat().st_size > 0
        except FileNotFoundError:
            return False

    def read_exit(self) -> Exit | None:
        """How the launcher ended; None if it has not told."""
        try:
            told = json.loads(self.exit.read_text(encoding="utf-8"))
            return Exit(
                int(told["code"]),
                str(told["cause"]),
                told["step"],
                dict(told["refused"]),
                tuple(told["lost"]),
                stopped=told.get("stopped"),  # a launcher that ran before an upgrade does not tell it
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def last_line(self) -> str:
        """The last line that the launcher printed before its ranks ran, for where it could not tell how it ended."""
        with suppress(OSError), self.out.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = file.read(_LAST_BYTES).decode(errors="replace").split("\n")
            return next((line.strip()[:_LINE] for line in reversed(lines) if line.strip()), "")
        return ""


def write_hosts(folder: Path, allocation: Allocation) -> None:
    """Write the host file of an allocation. A launcher that reads it sees the old one or the new one.

    Raises `OSError`.
    """
    lines = (
        f"{place.host} slots={place.ranks}" + (f" gpus={','.join(map(str, place.gpus))}" if place.gpus else "")
        for place in allocation
    )
    _replace(folder / "hosts", "".join(f"{line}\n" for line in lines))


def write_discovery_script(folder: Path) -> Path:
    """Write the script that prints the host file; returns its path. Raises `OSError`."""
    return _replace(folder / "discover", '#!/bin/sh\nexec cat "${0%/*}/hosts"\n', mode=0o700)


def _replace(path: Path, text: str, mode: int = 0o600) -> Path:
    """Replace a file as a whole. Without a sync: no launcher outlives a crash of this machine."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.chmod(mode)
    return new.replace(path)
