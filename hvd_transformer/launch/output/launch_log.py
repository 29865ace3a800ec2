"""The log of everything that a launched job prints."""

from functools import partial
from pathlib import Path

from hvd_transformer.launch.output.outlet import Outlet

_END_SECONDS = 10.0  # for the rest to be written


class LaunchLog:
    """Appends to a file once its folder exists: a refused start creates none. Nobody waits for the disk."""

    def __init__(self, file: Path) -> None:
        self._file, self._unwritten = file, ""
        self._outlet = Outlet("launch log")

    def write(self, text: str) -> None:
        """Append whole lines, unless more than 64 MiB wait already."""
        self._outlet.put(partial(self._append, text), size=len(text))

    def close(self) -> None:
        self._outlet.close(_END_SECONDS)

    def _append(self, text: str) -> None:
        self._unwritten += text
        if self._file.parent.is_dir():
            with self._file.open("a", encoding="utf-8") as file:
                file.write(self._unwritten)
            self._unwritten = ""
