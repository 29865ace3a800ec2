"""The newest value of every key of a metrics.jsonl, read from its end: what a table shows of a run."""

import os
from collections.abc import Sequence
from pathlib import Path

from hvd_transformer.service.runs.metrics.metrics_file import READ_BYTES, MetricsFile
from hvd_transformer.service.runs.metrics.metrics_rows import MOST_KEYS, Row, is_key, number, parse
from hvd_transformer.service.runs.plain_files import open_plain

_TAIL_BYTES = 1 << 16
_SEARCHED_BYTES = 1 << 23  # for the last evaluation, which may be far from the end
_EVALUATION = b'"valid_'


class NewestValues:
    """The last values of each key, up to date after `refresh`; what is null now has no value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = MetricsFile(path, tail=_TAIL_BYTES)
        self._restarts = 0
        self._began = False
        self.step: float | None = None
        self.values: dict[str, float] = {}

    @property
    def modified(self) -> float:
        """When the file was written last."""
        return self._file.modified

    def refresh(self) -> bool:
        """Read new lines; returns whether there were any. Raises `OSError`."""
        changed = False
        while (lines := self._file.read()) is not None:
            if not self._began or self._file.restarts != self._restarts:
                self._restarts, self._began = self._file.restarts, True
                self.step, self.values = None, {}
                self._take(self._last_evaluation(self._file.offset - len(lines)))
            self._take(parse(lines))
            changed = True
        return changed

    def _take(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.step = row["step"]
            for key, item in row.items():
                value = number(item)
                if value is None:
                    self.values.pop(key, None)
                elif key in self.values or (len(self.values) < MOST_KEYS and is_key(key)):
                    self.values[key] = value

    def _last_evaluation(self, before: int) -> list[Row]:
        """The last line of an evaluation before a place in the file."""
        file = open_plain(self._path)
        try:
            end = before
            while end > max(0, before - _SEARCHED_BYTES):
                begin = max(0, end - READ_BYTES)
                data = os.pread(file, end - begin, begin)
                found = data.rfind(_EVALUATION)
                if found >= 0:
                    start = data.rfind(b"\n", 0, found) + 1
                    return parse(os.pread(file, READ_BYTES, begin + start).partition(b"\n")[0])
                end = begin
        finally:
            os.close(file)
        return []
