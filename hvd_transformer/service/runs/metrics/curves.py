"""The curves of the runs that are looked at: read when somebody looks, and forgotten when memory is short.

Curves that nobody looks at cost nothing. Those of a long file are built in the background: what has been read so far is
shown meanwhile.

Where memory is short, curves that nobody looks at now are forgotten first. Of those that a page shows, the largest
become coarser: if they were forgotten, a page that compares many runs would have them read again for ever.
"""

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.comparison import MOST_RUNS
from hvd_transformer.service.runs.metrics.curve import Curve

_AT_ONCE = 2  # parts of the file (`READ_BYTES`) that are read before others get their turn
_IDLE_SECONDS = 900.0
_LOOKED_SECONDS = 30.0  # for which curves count as being looked at: a page asks again sooner, while they change

_log = logging.getLogger(__name__)


@dataclass
class _Kept:
    """`memory`: bytes, when it was last measured."""

    curve: Curve
    looked: float
    memory: int = 0
    reading: bool = False  # in the background


class Curves:
    """The curves that were looked at last, up to `limit` bytes of memory; those of one run may take more."""

    def __init__(self, limit: int = MOST_RUNS * (4 << 20)) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, _Kept] = OrderedDict()  # the one that was looked at last at the end
        self._memory = 0
        self._unread: SimpleQueue[tuple[Path, Curve]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def of(self, run: Path) -> Curve:
        """The curves of the run directory at a resolved path, with the lines that are in its file now.

        Of a long file that was not looked at before, the background reads the rest: `complete` tells when it has.
        Raises `UserError`.
        """
        with self._lock:
            kept = self._kept.get(run) or _Kept(Curve(run), 0.0)
            self._kept[run] = kept
            kept.looked = time.monotonic()
            self._kept.move_to_end(run)
        if not self._read(run, kept.curve):
            self._read_on(run, kept)
        return kept.curve

    def tidy(self) -> None:
        """Forget what nobody has looked at for a while; to be called now and then."""
        with self._lock:
            for run, kept in list(self._kept.items()):
                if time.monotonic() - kept.looked > _IDLE_SECONDS:
                    self._forget(run)

    def sizes(self) -> dict[Path, int]:
        """Bytes of memory of each run's curves."""
        with self._lock:
            return {run: kept.memory for run, kept in self._kept.items()}

    def _read(self, run: Path, curve: Curve) -> bool:
        """Read what is new, up to a limit; returns whether that was all. Raises `UserError`.

        Curves that an error has left half done are forgotten.
        """
        try:
            complete = curve.advance(_AT_ONCE)
        except Exception:
            with self._lock:
                self._forget(run)
            raise
        memory = curve.memory
        with self._lock:
            kept = self._kept.get(run)
            if kept is not None and kept.curve is curve:
                self._count(kept, memory)
            while self._memory > self._limit and len(self._kept) > 1:
                self._save_memory()
        return complete

    def _count(self, kept: _Kept, memory: int) -> None:
        self._memory += memory - kept.memory
        kept.memory = memory

    def _save_memory(self) -> None:
        """Forget the curves that were looked at first, unless that was just now and others can become coarser."""
        run, first = next(iter(self._kept.items()))
        if time.monotonic() - first.looked < _LOOKED_SECONDS:
            for kept in sorted(self._kept.values(), key=lambda kept: kept.memory, reverse=True):
                if (memory := kept.curve.coarsen()) is not None:
                    self._count(kept, memory)
                    return
        self._forget(run)

    def _forget(self, run: Path) -> None:
        if (kept := self._kept.pop(run, None)) is not None:
            self._memory -= kept.memory

    def _read_on(self, run: Path, kept: _Kept) -> None:
        with self._lock:
            if kept.reading:
                return
            kept.reading = True
            self._unread.put((run, kept.curve))
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_rest, name="curves", daemon=True)
                self._thread.start()

    def _read_rest(self) -> None:
        """In the background: the long files in turn, until each is complete or forgotten."""
        while True:
            run, curve = self._unread.get()
            with self._lock:
                kept = self._kept.get(run)
                if kept is None or kept.curve is not curve:
                    continue
            try:
                complete = self._read(run, curve)
            except UserError:  # who looks next is told
                continue
            except Exception:  # whatever it is, other runs have curves, too
                _log.exception("%s: metrics.jsonl", run)
                continue
            if complete:
                kept.reading = False
            else:
                self._unread.put((run, curve))
