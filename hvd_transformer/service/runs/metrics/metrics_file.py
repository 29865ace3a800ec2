"""Follows a growing metrics.jsonl by whole lines, and notices that it was cut or replaced."""

import os
from pathlib import Path

from hvd_transformer.service.runs.plain_files import open_plain

READ_BYTES = 1 << 19  # at once; a longer line is not one of ours, and is left out
_MARK_BYTES = 128


class MetricsFile:
    """Reads the complete lines of one file, each once, in parts.

    A run that resumes cuts the lines of the steps that it repeats, in place or in a new file. So whenever the file has
    changed, it must still be the same one, be at least as long as what was read, and have the same bytes just before
    the place where reading stopped. Otherwise `restarts` is counted, and reading begins anew.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        """`tail`: begin with the first line in so many last bytes, the first time and whenever reading begins anew."""
        self._path, self._tail = path, tail
        self._identity: tuple[int, int] | None = None
        self._seen: tuple[int, ...] = ()  # what identified the file when it had been read to its end
        self._mark = b""  # the bytes before `offset`
        self._in_line = False  # `offset` is within a line that is left out
        self.offset = 0  # of the first byte that has not been read
        self.size = 0
        self.modified = 0.0  # seconds since the epoch
        self.restarts = 0

    def read(self) -> bytes | None:
        """The next complete lines; None if there is nothing new. Raises `OSError`.

        Empty if what was read belongs to a line that is left out: there may be more.
        """
        if _signature(self._path.lstat()) == self._seen:
            return None
        file = open_plain(self._path)
        try:
            status = os.fstat(file)
            self._check(file, status)
            data = os.pread(file, READ_BYTES, self.offset)
        finally:
            os.close(file)
        end = data.rfind(b"\n") + 1
        if not end and len(data) < READ_BYTES:  # the end, or half a line
            self._seen = _signature(status)
            return None
        whole = data[: end or len(data)]
        self.offset += len(whole)
        self._mark = (self._mark + whole[-_MARK_BYTES:])[-_MARK_BYTES:]
        lines = whole.partition(b"\n")[2] if self._in_line else whole
        self._in_line = not end
        return lines if end else b""

    def _check(self, file: int, status: os.stat_result) -> None:
        identity = (status.st_dev, status.st_ino)
        if self._identity is None:
            self._begin(status.st_size)
        elif (
            identity != self._identity
            or status.st_size < self.offset
            or os.pread(file, len(self._mark), self.offset - len(self._mark)) != self._mark
        ):
            self.restarts += 1
            self._begin(status.st_size)
        self._identity, self.size, self.modified = identity, status.st_size, status.st_mtime

    def _begin(self, size: int) -> None:
        self.offset = 0 if self._tail is None else max(0, size - self._tail)
        self._mark, self._in_line = b"", self.offset > 0


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
