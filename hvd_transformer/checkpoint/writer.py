"""Writes checkpoints in a background thread, so that training waits only for the snapshot."""

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from hvd_transformer.checkpoint.store import CheckpointStore, Snapshot

log = logging.getLogger("hvd_transformer")


class CheckpointWriter:
    """One write at a time, of this rank's part: all of it on rank 0 where no others write.

    A failed one is told to `warn`; training goes on and older checkpoints stay.
    """

    def __init__(self, store: CheckpointStore, warn: Callable[[str], None], rank: int = 0) -> None:
        self.store, self.warn, self.rank = store, warn, rank
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[Snapshot, Future[object]] | None = None
        self._ending = Event()

    def submit(self, snapshot: Snapshot, aside: Path | None = None, others: Collection[int] = ()) -> None:
        """Starts the write; waits for the one before, so that at most one snapshot is held."""
        self.wait()
        if self.rank == 0:
            future = self._thread.submit(_logged, snapshot.step, self.store.save, snapshot, aside, others, self._ending)
        else:
            assert aside is not None
            future = self._thread.submit(_logged, snapshot.step, self.store.save_part, [snapshot], aside, self.rank)
        self._pending = snapshot, future

    def wait(self, ending: bool = False) -> None:
        """Returns when the last write has ended. `ending`: the others may have gone, and are not waited for long."""
        if self._pending is None:
            return
        if ending:
            self._ending.set()
        (snapshot, future), self._pending = self._pending, None
        try:
            future.result()
        except OSError as error:
            self.failed(snapshot.step, error)

    def failed(self, step: int, error: OSError) -> None:
        """Says so."""
        self.warn(
            f"the checkpoint of step {step} could not be written to {self.store.folder}: {error}; "
            "training goes on, the checkpoints before it stay"
        )

    def close(self) -> None:
        """Waits for the last write and ends the thread."""
        self.wait()
        self._thread.shutdown()


def _logged(step: int, write: Callable[..., object], *arguments: object) -> object:
    """Calls `write`, and logs what it took beside training."""
    began = time.perf_counter(), time.thread_time()
    result = write(*arguments)
    seconds, processor = time.perf_counter() - began[0], time.thread_time() - began[1]
    log.info("checkpoint of step %d: written in %.3f s, %.4f s of it on a core", step, seconds, processor)
    return result
