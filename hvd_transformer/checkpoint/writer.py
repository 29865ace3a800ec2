"""Writes checkpoints in a background thread, so that training waits only for the snapshot."""

import logging
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hvd_transformer.checkpoint import staging
from hvd_transformer.checkpoint.layout import Writers
from hvd_transformer.checkpoint.shared_folder import seen_by
from hvd_transformer.checkpoint.staging import Writing
from hvd_transformer.checkpoint.store import CheckpointStore, Snapshot
from hvd_transformer.comm.rounds import Advance, Rounds
from hvd_transformer.comm.world import World

_LOOK_SECONDS = 0.25  # between two looks at how far a write is

log = logging.getLogger("hvd_transformer")


class Begun(NamedTuple):
    """A checkpoint that is to be written: its staging folder, and who writes into it."""

    folder: Path
    writers: Writers


class _Pending(NamedTuple):
    """What the thread writes of a step."""

    step: int
    written: Future[object]
    writing: Writing


class Saver:
    """Saves checkpoints: each rank that sees rank 0's folder writes its part while training continues.

    A failed write is reported to `warn`; training continues and older checkpoints stay.
    """

    def __init__(self, store: CheckpointStore, world: World, warn: Callable[[str], None]) -> None:
        self.store, self.world, self.warn = store, world, warn
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._begun = False  # a checkpoint, by all ranks, since the last wait
        self._pending: _Pending | None = None  # what this rank writes
        self.unsaved: set[int] = set()  # on rank 0, the steps whose checkpoints could not be written

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
        folder, self._begun = Path(created), True
        sees = seen_by(self.world, self.world.rank == 0 or staging.enter(folder, self.world.rank))
        return Begun(folder, Writers.of(self.world.hosts, sees))

    def save(self, snapshot: Snapshot, begun: Begun) -> None:
        """Start writing what this rank captured."""
        rank = self.world.rank
        if rank == 0:
            self._start(snapshot.step, self.store.save, snapshot, begun.folder)
        elif begun.writers.hosts[rank] is not None:
            self._start(snapshot.step, self.store.save_part, snapshot, begun.folder, rank)

    def wait(self) -> None:
        """Wait for the last write of all ranks, however long it takes while it goes on. Collective."""
        if self._begun:
            self._begun = False
            rounds = Rounds(self.world, waits=self._waits_for_others)
            rounds.run(lambda advance: self._follow(advance, rounds))
            self._settle()

    def poll(self) -> None:
        """Tell if this rank's last write has ended and failed; waits for nothing."""
        if self._pending is not None and self._pending.written.done():
            self._settle()

    def end(self) -> None:
        """Wait for this rank's last write where the job fails: other ranks may be gone, it waits for them briefly."""
        if self._pending is not None:
            self._pending.writing.ending.set()
            self._settle()

    def close(self) -> None:
        """Wait for the last write of all ranks and end the thread. Collective."""
        self.wait()
        self._thread.shutdown()

    def _start(self, step: int, write: Callable[..., object], *arguments: object) -> None:
        writing = Writing()
        self._pending = _Pending(step, self._thread.submit(_logged, step, write, *arguments, writing), writing)

    def _waits_for_others(self) -> bool:
        return self._pending is not None and self._pending.writing.waits

    def _follow(self, advance: Advance, rounds: Rounds) -> None:
        """Call `advance` while this rank's write goes on, until it has ended, or waits for a rank that is lost."""
        if self._pending is None:
            return
        seen = 0
        while futures.wait([self._pending.written], _LOOK_SECONDS).not_done and not rounds.lost:
            if (blocks := self._pending.writing.blocks) != seen:
                seen = blocks
                advance()

    def _settle(self) -> None:
        """Wait for this rank's write, and tell if it failed."""
        if self._pending is None:
            return
        (step, written, _), self._pending = self._pending, None
        try:
            written.result()
        except OSError as error:
            self._failed(step, error)
        else:
            self.unsaved.discard(step)

    def _failed(self, step: int, error: OSError) -> None:
        self.unsaved.add(step)
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
