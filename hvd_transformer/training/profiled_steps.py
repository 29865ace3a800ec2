"""The few steps of a start that `profile` records, and the file that they are written to."""

import logging
from collections.abc import Callable
from pathlib import Path

from hvd_transformer import atomic
from hvd_transformer.monitoring.timeline import Timeline

log = logging.getLogger(__name__)
# The first two steps after a start are slower than the rest.
_PROFILED = range(3, 8)


class ProfiledSteps:
    """If `wanted`, records them in `timeline`, which is written to `file` once, after the last of them."""

    def __init__(self, timeline: Timeline, file: Path, warn: Callable[[str], object], *, wanted: bool) -> None:
        self._timeline, self._file, self._warn, self._wanted = timeline, file, warn, wanted
        self._written = False

    def begin(self, number: int) -> None:
        """Call before each step of this start; the first one is number 1."""
        self._timeline.recording = self._wanted and number in _PROFILED

    def end(self, number: int) -> None:
        """Call after each step."""
        if number == _PROFILED[-1]:
            self.write()

    def write(self) -> None:
        """Write what there is, also of a run with fewer steps."""
        self._timeline.recording = False
        if self._written or not self._timeline.has_spans:
            return
        self._written = True
        try:
            atomic.write_text(self._file, self._timeline.trace())
            log.info("steps %d to %d of this start are in %s", _PROFILED[0], _PROFILED[-1], self._file)
        except OSError as error:
            self._warn(f"{self._file}: cannot be written: {error}")
