"""Writes checkpoints in a background thread, so that training waits only for the snapshot."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from threading import Event

import torch

from hvd_transformer.checkpoint.store import CheckpointStore, Snapshot
from hvd_transformer.checkpoint.tensor_file import StridedBlocks, TensorShard
from hvd_transformer.comm.world import World

log = logging.getLogger("hvd_transformer")
# Bytes sent to rank 0 at a time by a rank that does not see its folder.
SEND_BYTES = 32 << 20


class Saver:
    """Saves checkpoints on all `ranks` that have a part, rank 0 first: each writes its part while training continues.

    A rank on a host that does not see rank 0's folder sends its part to rank 0 in chunks; training waits for that.
    A failed write is reported to `warn`; training continues and older checkpoints stay.
    """

    def __init__(self, store: CheckpointStore, world: World, ranks: list[int], warn: Callable[[str], None]) -> None:
        self.store, self.world, self.ranks, self.warn = store, world, ranks, warn
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[object]] | None = None  # the step that is written
        self._ending = Event()

    def save(self, snapshot: Snapshot) -> None:
        """Start writing this rank's part, after the previous one: at most one snapshot is in memory. Collective."""
        self.wait()
        if len(self.ranks) > 1:
            self._save_together(snapshot)
        elif self.world.rank == 0:
            self._start(snapshot.step, self.store.save, snapshot)

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

    def close(self) -> None:
        """Wait for the last write and end the thread."""
        self.wait()
        self._thread.shutdown()

    def _start(self, step: int, write: Callable[..., object], *arguments: object) -> None:
        self._pending = step, self._thread.submit(_logged, step, write, *arguments)

    def _failed(self, step: int, error: OSError) -> None:
        self.warn(
            f"the checkpoint of step {step} could not be written to {self.store.folder}: {error}; "
            "training goes on, the checkpoints before it stay"
        )

    def _save_together(self, snapshot: Snapshot) -> None:
        rank, others, created = self.world.rank, self.ranks[1:], None
        if rank == 0:
            try:
                created = str(self.store.begin(snapshot, others))
            except OSError as error:
                self._failed(snapshot.step, error)
        created = self.world.broadcast_object(created)
        if created is None:
            return
        staging = Path(created)
        sees = self.world.all_gather_objects(staging.is_dir())
        for other in others:
            if not sees[other]:
                self._send(snapshot, staging, other)
        if rank == 0:
            self._start(snapshot.step, self.store.save, snapshot, staging, others, self._ending)
        elif rank in others and sees[rank]:
            self._start(snapshot.step, self.store.save_part, [snapshot], staging, rank)

    def _send(self, snapshot: Snapshot, staging: Path, rank: int) -> None:
        """Send the part of `rank` to rank 0, which writes it. Collective."""
        parts = self._parts(snapshot, rank)
        if self.world.rank == 0:
            try:
                self.store.save_part(parts, staging, rank)
            except OSError as error:
                self._failed(snapshot.step, error)
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


def _logged(step: int, write: Callable[..., object], *arguments: object) -> None:
    """Call `write`, and log its wall time and CPU time."""
    began = time.perf_counter(), time.thread_time()
    write(*arguments)
    seconds, processor = time.perf_counter() - began[0], time.thread_time() - began[1]
    log.info("checkpoint of step %d: written in %.3f s, %.4f s of it on a core", step, seconds, processor)


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
