"""The log of everything that a launched job prints."""

from collections import deque
from contextlib import closing
from functools import partial
from pathlib import Path

from hvd_transformer.launch.output.outlet import Outlet
from hvd_transformer.reporting.step_lines import AppendedFile

_END_SECONDS = 10.0  # for the rest to be written
_MOST_UNWRITTEN = 1 << 24  # characters kept while there is no folder, the last ones


class LaunchLog:
    """Appends to a file once its folder exists: a refused start creates none. Nobody waits for the disk.

    With `make_folder` set the folder is made in the end, as nobody else has told what went wrong.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._unwritten, self._size = file, deque[str](), 0
        self.make_folder = False
        self._outlet = Outlet("launch log")

    def write(self, text: str) -> None:
        """Append whole lines, unless more than 64 MiB wait already."""
        self._outlet.put(partial(self._append, text), size=len(text))

    def close(self) -> None:
        if self.make_folder:
            self._outlet.put(self._write_rest)
        self._outlet.close(_END_SECONDS)

    def _write_rest(self) -> None:
        if self._unwritten:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._append("")

    def _append(self, text: str) -> None:
        self._unwritten.append(text)
        self._size += len(text)
        if self._file.parent.is_dir():
            with closing(AppendedFile(self._file)) as file:
                if file.write("".join(self._unwritten).encode()) is None:
                    self._unwritten.clear()
                    self._size = 0
        while self._size > _MOST_UNWRITTEN:  # the folder is not there, or the disk is full
            self._size -= len(self._unwritten.popleft())
