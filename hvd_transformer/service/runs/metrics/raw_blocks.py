"""Where in metrics.jsonl the lines of which steps are, to read again the few that a close view shows in full."""

import os
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from hvd_transformer.service.runs.metrics.metrics_rows import Column, columns, in_order, parse
from hvd_transformer.service.runs.plain_files import open_plain

_BLOCK_BYTES = 1 << 18
_MOST_BLOCKS = 8  # of a view: some 8,000 lines
_MOST_CACHED = 16


class RawBlocks:
    """A table of blocks of lines, and the columns of those that were looked at last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets, self._first_steps = array("Q"), array("d")
        self._end = 0
        self._cached: OrderedDict[int, Mapping[str, Column]] = OrderedDict()

    def add(self, offset: int, end: int, first_step: float) -> None:
        """Take the next lines: those in the bytes [offset, end) of the file."""
        if not self._offsets or offset - self._offsets[-1] >= _BLOCK_BYTES:
            self._offsets.append(offset)
            self._first_steps.append(first_step)
        self._end = end

    def points(self, key: str, first: float, last: float) -> Column | None:
        """All points of a key between two steps; None if that is too much to read. Raises `OSError`."""
        start = max(0, bisect_left(self._first_steps, first) - 1)
        stop = bisect_right(self._first_steps, last)
        if stop - start > _MOST_BLOCKS:
            return None
        found = Column(array("d"), array("d"))
        for number in range(start, stop):
            own = self._columns(number).get(key)
            if own is not None:
                begin, end = bisect_left(own.steps, first), bisect_right(own.steps, last)
                found.steps.extend(own.steps[begin:end])
                found.values.extend(own.values[begin:end])
        return found

    def forget(self) -> None:
        """Forget the columns; they can be read again."""
        self._cached.clear()

    @property
    def memory(self) -> int:
        """Bytes of memory, roughly: keys share the arrays of their steps."""
        points = (len(column.values) for block in self._cached.values() for column in block.values())
        return 16 * len(self._offsets) + 10 * sum(points)

    def _columns(self, number: int) -> Mapping[str, Column]:
        """The columns of a block. The last one still grows, and is not kept."""
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        is_last = number == len(self._offsets) - 1
        begin, end = self._offsets[number], self._end if is_last else self._offsets[number + 1]
        file = open_plain(self._path)
        try:
            rows = parse(os.pread(file, end - begin, begin))
        finally:
            os.close(file)
        found = columns(in_order(rows, self._first_steps[number]), {})
        if not is_last:
            self._cached[number] = found
            if len(self._cached) > _MOST_CACHED:
                self._cached.popitem(last=False)
        return found
