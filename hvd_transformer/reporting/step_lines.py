"""Files with one JSON object per line and step: lines appear whole, and a resumed run cuts those that it repeats."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

# Records kept in memory while the disk is full; later ones are dropped.
_MOST_WAITING = 10_000
_BLOCK_BYTES = 1 << 16  # read at once


class AppendedFile:
    """A file that grows by whole records: a record that did not fit is removed and retried later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0  # of whole records
        self._torn = False
        self._waiting: list[bytes] = []

    def append(self, record: bytes) -> OSError | None:
        """Write pending records and `record`. Returns the error instead of raising it."""
        if record and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(record)
        error = self.write(b"".join(self._waiting))
        if error is None:
            self._waiting.clear()
        return error

    def write(self, data: bytes) -> OSError | None:
        """Write all of `data` or nothing. Returns the error instead of raising it."""
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                self._size = os.fstat(self._descriptor).st_size
            if self._torn:
                os.ftruncate(self._descriptor, self._size)
                self._torn = False
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            if self._descriptor is not None:  # remove a half-written record, now or at the next call
                self._torn = True
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                    self._torn = False
            return error
        self._size += len(data)
        return None

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def cut_after(path: Path, keeps: Callable[[Mapping[str, Any]], bool]) -> None:
    """Remove the lines after the last one that `keeps` accepts, and incomplete lines.

    Reads no more of the file than that: lines are in the order of their steps. Needs no space on the disk.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        lines = _from_end(file, size)
        end = next((end for end, line in lines if (row := read_line(line)) is not None and keeps(row)), 0)
        if end < size:
            file.truncate(end)


def _from_end(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file, the last one first, each with the place of its end."""
    begin, rest = size, b""  # of what has been read, and the line whose beginning has not
    while begin > 0:
        length = min(begin, _BLOCK_BYTES)
        begin = file.seek(begin - length)
        data = file.read(length) + rest
        rest, *lines = data.split(b"\n")
        if not lines:
            continue
        end = begin + len(data) - len(lines.pop())  # an incomplete last line, or what is behind the last line feed
        for line in reversed(lines):
            yield end, line
            end -= len(line) + 1
        rest += b"\n"
    if rest.endswith(b"\n"):
        yield len(rest), rest


def read_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for one that is incomplete or not ours."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and is_number(row.get("step")) else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value can be drawn: null, text and booleans cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
