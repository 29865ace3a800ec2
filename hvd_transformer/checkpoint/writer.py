"""Writes checkpoints in a background thread, so that training waits only for the snapshot."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hvd_transformer.checkpoint.store import CheckpointStore, Snapshot


class CheckpointWriter:
    """One write at a time. A failed one is told to `warn`; training goes on and older checkpoints stay."""

    def __init__(self, store: CheckpointStore, warn: Callable[[str], None]) -> None:
        self.store, self.warn = store, warn
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[Snapshot, Future[Path]] | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Starts the write; waits for the one before, so that at most one snapshot is held."""
        self.wait()
        self._pending = snapshot, self._thread.submit(self.store.save, snapshot)

    def wait(self) -> None:
        """Returns when the last write has ended."""
        if self._pending is None:
            return
        (snapshot, future), self._pending = self._pending, None
        try:
            future.result()
        except OSError as error:
            self.warn(
                f"the checkpoint of step {snapshot.step} could not be written to {self.store.folder}: {error}; "
                "training goes on, the checkpoints before it stay"
            )

    def close(self) -> None:
        """Waits for the last write and ends the thread."""
        self.wait()
        self._thread.shutdown()
