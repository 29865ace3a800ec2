"""Writes checkpoints in a background thread, so that training waits only for the snapshot."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple

from hvd_transformer.checkpoint import staging
from hvd_transformer.checkpoint.layout import Writers
from hvd_transformer.checkpoint.shared_folder import seen_by
from hvd_transformer.checkpoint.store import CheckpointStore, Snapshot
from hvd_transformer.comm.world import World

log = logging.getLogger("hvd_transformer")


class Begun(NamedTuple):
    """A checkpoint that is to be written: its staging folder, and who writes into it."""

    folder: Path
    writers: Writers


class Saver:
    """Saves checkpoints: each rank that sees rank 0's folder writes its part while training continues.

    A failed write is reported to `warn`; training continues and older checkpoints stay.
    """

    def __init__(self, store: CheckpointStore, world: World, warn: Callable[[str], None]) -> None:
        self.store, self.world, self.warn = store, world, warn
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[object]] | None = None  # the step that is written
        self._ending = Event()
        self.unsaved: int | None = None  # on rank 0, the step of the last checkpoint, if it could not be written

    def begin(self, step: int) -> Begun | None:
        """Create the staging folder, after the previous write: at most one snapshot is in memory. Collective.

        Returns None if rank 0 cannot create it.
        """
        self.wait()
        created = None
        if self.world.rank == 0:
            try:
                created = str(self.store.begin(step))
            except OSError as error:
                self._failed(step, error)
        created = self.world.broadcast_object(created)
        if created is None:
            return None
        folder = Path(created)
        sees = seen_by(self.world, self.world.rank == 0 or staging.enter(folder, self.world.rank))
        return Begun(folder, Writers.of(self.world.hosts, sees))

    def save(self, snapshot: Snapshot, begun: Begun) -> None:
        """Start writing what this rank captured."""
        rank = self.world.rank
        if rank == 0:
            self._start(snapshot.step, self.store.save, snapshot, begun.folder, self._ending)
        elif begun.writers.hosts[rank] is not None:
            self._start(snapshot.step, self.store.save_part, snapshot, begun.folder, rank, self._ending)

    def wait(self, ending: bool = False) -> None:
        """Wait for this rank's last write. With `ending`, other ranks may be gone, and it waits for them briefly."""
        if self._pending is None:
            return
        if ending:
            self._ending.set()
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except OSError as error:
            self._failed(step, error)
        else:
            self.unsaved = None

    def close(self) -> None:
        """Wait for the last write and end the thread."""
        self.wait()
        self._thread.shutdown()

    def _start(self, step: int, write: Callable[..., object], *arguments: object) -> None:
        self._pending = step, self._thread.submit(_logged, step, write, *arguments)

    def _failed(self, step: int, error: OSError) -> None:
        self.unsaved = step
        self.warn(
            f"the checkpoint of step {step} could not be written to {self.store.folder}: {error}; "
            "training continues, and earlier checkpoints are kept"
        )


def _logged(step: int, write: Callable[..., object], *arguments: object) -> None:
    """Call `write`, and log its wall time and CPU time."""
    began = time.perf_counter(), time.thread_time()
    write(*arguments)
    seconds, processor = time.perf_counter() - began[0], time.thread_time() - began[1]
    log.info("checkpoint of step %d: written in %.3f s, %.4f s of it on a core", step, seconds, processor)
