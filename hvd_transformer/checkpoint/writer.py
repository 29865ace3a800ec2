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
    """Writes this rank's part of one checkpoint at a time, in a background thread.

    A failed write is reported to `warn`; training continues and older checkpoints stay.
    """

    def __init__(self, store: CheckpointStore, warn: Callable[[str], None], rank: int = 0) -> None:
        self.store, self.warn, self.rank = store, warn, rank
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[Snapshot, Future[object]] | None = None
        self._ending = Event()

    def submit(self, snapshot: Snapshot, staging: Path | None = None, others: Collection[int] = ()) -> None:
        """Start a write. Waits for the previous one first, so that at most one snapshot is in memory."""
        self.wait()
        if self.rank == 0:
            future = self._thread.submit(
                _logged, snapshot.step, self.store.save, snapshot, staging, others, self._ending
            )
        else:
            assert staging is not None
            future = self._thread.submit(_logged, snapshot.step, self.store.save_part, [snapshot], staging, self.rank)
        self._pending = snapshot, future

    def wait(self, ending: bool = False) -> None:
        """Wait for the last write. With `ending`, other ranks may be gone, and it waits for them only briefly."""
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
        """Report a failed write."""
        self.warn(
            f"the checkpoint of step {step} could not be written to {self.store.folder}: {error}; "
            "training goes on, the checkpoints before it stay"
        )

    def close(self) -> None:
        """Wait for the last write and end the thread."""
        self.wait()
        self._thread.shutdown()


def _logged(step: int, write: Callable[..., object], *arguments: object) -> object:
    """Call `write`, and log its wall time and CPU time."""
    began = time.perf_counter(), time.thread_time()
    result = write(*arguments)
    seconds, processor = time.perf_counter() - began[0], time.thread_time() - began[1]
    log.info("checkpoint of step %d: written in %.3f s, %.4f s of it on a core", step, seconds, processor)
    return result


# Bytes sent to rank 0 at a time by a rank that does not see its folder.
SEND_BYTES = 32 << 20


class Saver:
    """Saves checkpoints on all `ranks` that have a part, rank 0 first: each writes its part while training continues.

    A rank on a host that does not see rank 0's folder sends its part to rank 0 in chunks; training waits for that.
    """

    def __init__(self, store: CheckpointStore, world: World, ranks: list[int], warn: Callable[[str], None]) -> None:
        self.store, self.world, self.ranks = store, world, ranks
        self._writer = CheckpointWriter(store, warn, world.rank) if world.rank in ranks else None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing this rank's part. Call `wait` before. Collective."""
        if len(self.ranks) > 1:
            self._save_together(snapshot)
        elif self._writer is not None:
            self._writer.submit(snapshot)

    def wait(self, ending: bool = False) -> None:
        """Wait for this rank's last write. With `ending`, an error ends the job and other ranks may be gone."""
        if self._writer is not None:
            self._writer.wait(ending)

    def close(self) -> None:
        """Wait for the last write and end its thread."""
        if self._writer is not None:
            self._writer.close()

    def _save_together(self, snapshot: Snapshot) -> None:
        staging = self._begin(snapshot)
        if staging is None:
            return
        sees = self.world.all_gather_objects(staging.is_dir())
        for rank in self.ranks:
            if not sees[rank]:
                self._send(snapshot, staging, rank)
        if self._writer is not None and sees[self.world.rank]:
            self._writer.submit(snapshot, staging, self.ranks[1:])

    def _begin(self, snapshot: Snapshot) -> Path | None:
        """The staging folder; None if rank 0 could not create it and has reported that. Collective."""
        made = None
        if self._writer is not None and self.world.rank == 0:
            try:
                made = str(self.store.begin(snapshot, self.ranks[1:]))
            except OSError as error:
                self._writer.failed(snapshot.step, error)
        made = self.world.broadcast_object(made)
        return None if made is None else Path(made)

    def _send(self, snapshot: Snapshot, staging: Path, rank: int) -> None:
        """Send the part of `rank` to rank 0, which writes it. Collective."""
        parts = self._parts(snapshot, rank)
        if self._writer is not None and self.world.rank == 0:
            try:
                self.store.save_part(parts, staging, rank)
            except OSError as error:
                self._writer.failed(snapshot.step, error)
        for _ in parts:  # on the other ranks, and what rank 0 has not consumed after an error
            pass

    def _parts(self, snapshot: Snapshot, rank: int) -> Iterator[Snapshot]:
        """The part of `rank` in chunks, on every rank. Collective."""
        own = list(_chunks(snapshot)) if self.world.rank == rank else []
        descriptions = [
            [(file, name, part.start, len(part.values), astuple(part.blocks)) for file, name, part in chunk]
            for chunk in own
        ]
        for number, chunk in enumerate(self.world.all_gather_objects(descriptions)[rank]):
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
    """The shards by file and name, about `SEND_BYTES` at a time."""
    chunk: list[tuple[str, str, TensorShard]] = []
    room = SEND_BYTES
    for file, shards in snapshot.tensors.items():
        for name, whole in shards.items():
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
