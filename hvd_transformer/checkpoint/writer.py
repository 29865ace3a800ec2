"""Writes checkpoints in a background thread, so that training waits only for the snapshot."""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from threading import Event

import torch

from hvd_transformer.checkpoint.store import CheckpointStore, Snapshot
from hvd_transformer.checkpoint.tensor_file import StridedBlocks, TensorShard
from hvd_transformer.comm.world import World

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


# Sent to rank 0 at a time, from a rank that does not see its folder.
SEND_BYTES = 32 << 20


class Saver:
    """Rank 0's writer and those of the other `ranks` that have a part: each writes its own while training goes on.

    Ranks on a host that does not see rank 0's folder send theirs to it, a little at a time, and training waits.
    """

    def __init__(self, store: CheckpointStore, world: World, ranks: list[int], warn: Callable[[str], None]) -> None:
        self.store, self.world, self.ranks = store, world, ranks
        self._writer = CheckpointWriter(store, warn, world.rank) if world.rank in ranks else None

    def save(self, snapshot: Snapshot) -> None:
        """Begins the write of what this rank has; `wait` first. Collective."""
        if len(self.ranks) > 1:
            self._save_together(snapshot)
        elif self._writer is not None:
            self._writer.submit(snapshot)

    def wait(self, ending: bool = False) -> None:
        """Returns when this rank's last write has ended. `ending`: an error ends the job, other ranks may be gone."""
        if self._writer is not None:
            self._writer.wait(ending)

    def close(self) -> None:
        """Waits for the last write and ends its thread."""
        if self._writer is not None:
            self._writer.close()

    def _save_together(self, snapshot: Snapshot) -> None:
        aside = self._begin(snapshot)
        if aside is None:
            return
        sees = self.world.all_gather_objects(aside.is_dir())
        for rank in self.ranks:
            if not sees[rank]:
                self._send(snapshot, aside, rank)
        if self._writer is not None and sees[self.world.rank]:
            self._writer.submit(snapshot, aside, self.ranks[1:])

    def _begin(self, snapshot: Snapshot) -> Path | None:
        """The folder aside; None where rank 0 cannot make it, which it says."""
        made = None
        if self._writer is not None and self.world.rank == 0:
            try:
                made = str(self.store.begin(snapshot, self.ranks[1:]))
            except OSError as error:
                self._writer.failed(snapshot.step, error)
        made = self.world.broadcast_object(made)
        return None if made is None else Path(made)

    def _send(self, snapshot: Snapshot, aside: Path, rank: int) -> None:
        """Rank 0 writes what this rank has. Collective."""
        parts = self._parts(snapshot, rank)
        if self._writer is not None and self.world.rank == 0:
            try:
                self.store.save_part(parts, aside, rank)
            except OSError as error:
                self._writer.failed(snapshot.step, error)
        for _ in parts:  # the sender's turn, and what rank 0 could not write
            pass

    def _parts(self, snapshot: Snapshot, rank: int) -> Iterator[Snapshot]:
        """What this rank has, on every rank."""
        own = list(_chunks(snapshot)) if self.world.rank == rank else []
        described = [
            [(file, name, part.start, len(part.values), astuple(part.blocks)) for file, name, part in chunk]
            for chunk in own
        ]
        for number, chunk in enumerate(self.world.all_gather_objects(described)[rank]):
            counts = [count for _, _, _, count, _ in chunk]
            file, name = chunk[0][:2]
            values = snapshot.tensors[file][name].values.new_empty(sum(counts))
            if own:
                torch.cat([part.values for _, _, part in own[number]], out=values)
            self.world.broadcast_(values, f"save.{number % 4}", root=rank)
            tensors: dict[str, dict[str, TensorShard]] = {}
            for (file, name, start, _, blocks), some in zip(chunk, values.split(counts), strict=True):
                shape = snapshot.tensors[file][name].shape
                tensors.setdefault(file, {})[name] = TensorShard(shape, StridedBlocks(*blocks), start, some)
            yield replace(snapshot, tensors=tensors)


def _chunks(snapshot: Snapshot) -> Iterator[list[tuple[str, str, TensorShard]]]:
    """Its numbers by file and name, `SEND_BYTES` at a time."""
    chunk: list[tuple[str, str, TensorShard]] = []
    room = SEND_BYTES
    for file, fragments in snapshot.tensors.items():
        for name, whole in fragments.items():
            start, values = whole.start, whole.values
            while values.numel():
                some = values[: max(1, room // values.element_size())]
                chunk.append((file, name, replace(whole, start=start, values=some)))
                start, values, room = start + some.numel(), values[some.numel() :], room - some.nbytes
                if room <= 0:
                    yield chunk
                    chunk, room = [], SEND_BYTES
    if chunk:
        yield chunk
