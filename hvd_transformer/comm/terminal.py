"""Where the user of a launched job looks: the launcher's terminal, which a rank does not get for its own.

horovodrun reads its workers through pipes and puts `[0]<stdout>:` before each line; mpirun gives them a
pseudo-terminal of its own, also when its output goes to a file. A progress bar works in neither. So rank 0, where
it runs on the launcher's host, looks up its ancestors for the launcher and draws on that one's terminal.
"""

import sys
from pathlib import Path
from typing import TextIO

from hvd_transformer.comm.environment import launched

_LAUNCHERS = ("horovodrun", "mpirun", "mpiexec", "orterun", "prterun")


def screen() -> tuple[TextIO, bool]:
    """The stream to show progress on, and whether it is a terminal."""
    if launched().size == 1:
        return sys.stdout, sys.stdout.isatty()
    terminal = _launcher_terminal()
    if terminal is None:
        return sys.stdout, False
    try:
        return terminal.open("w", encoding="utf-8"), True
    except OSError:
        return sys.stdout, False


def _launcher_terminal() -> Path | None:
    """The outermost launcher's standard output, where that is a terminal. Linux only: elsewhere None."""
    found: Path | None = None
    for process in _ancestors():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            target = (process / "fd" / "1").readlink()
        except OSError:
            continue
        if any(Path(word.decode(errors="replace")).name in _LAUNCHERS for word in words[:2]):
            found = target if target.is_char_device() and str(target).startswith(("/dev/pts/", "/dev/tty")) else None
    return found


def _ancestors() -> list[Path]:
    """This process's parents in /proc, nearest first."""
    result: list[Path] = []
    process = Path("/proc/self")
    while True:
        try:
            status = (process / "status").read_text()
        except OSError:
            return result
        parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
        if parent == "0":
            return result
        process = Path("/proc") / parent
        result.append(process)
