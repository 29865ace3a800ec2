"""Files with one JSON object per line and step: lines appear whole, and a resumed run cuts those that it repeats."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from hvd_transformer import atomic

# Records kept in memory while the disk is full; later ones are dropped.
_MOST_WAITING = 10_000


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
        data = b"".join(self._waiting)
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
        self._waiting.clear()
        return None

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def cut_after(path: Path, step: int) -> None:
    """Remove the lines after `step`, and incomplete lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for line in lines if (row := read_line(line)) and row["step"] <= step)
    if kept == data:
        return
    try:
        atomic.write_bytes(path, kept)
    except OSError:
        # No space for a second file. What is removed is nearly always the end, and truncating needs no space.
        if not data.startswith(kept):
            raise
        os.truncate(path, len(kept))


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
