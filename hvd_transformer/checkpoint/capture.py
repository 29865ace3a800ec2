"""Captures an engine's weights, optimizer state and errors of compressed gradients.

Each rank copies what it writes of a checkpoint.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hvd_transformer.checkpoint import engine_state
from hvd_transformer.checkpoint.engine_state import Shards
from hvd_transformer.checkpoint.exchange import Held, exchange
from hvd_transformer.checkpoint.layout import Files, Piece, ShardFiles, SharedFiles, Span, Writers, index
from hvd_transformer.checkpoint.shards import TensorShard, overlap
from hvd_transformer.checkpoint.store import FORMAT, MODEL, OPTIMIZER, OUTER, WIRE, Snapshot
from hvd_transformer.checkpoint.tensor_file import FilePart
from hvd_transformer.comm.group import Group
from hvd_transformer.comm.streams import has_streams
from hvd_transformer.parallel.engine import Engine


class Capture:
    """Copies what this rank writes of an engine's checkpoints to host memory: worked out once, copied for each.

    The memory is kept. A job must have room for it anyway, and in fresh memory a copy takes three times as long.
    """

    def __init__(self, engine: Engine, writers: Writers | None = None) -> None:
        """Without `writers` every rank sees the folder. Collective."""
        world = engine.world
        self.engine, self.writers = engine, writers or Writers.of(world.hosts, [True] * world.size)
        shards = {MODEL: engine_state.weights(engine), OPTIMIZER: engine_state.optimizer_state(engine)}
        files: dict[str, Files] = {
            MODEL: SharedFiles(_whole(shards[MODEL]), self.writers),
            OPTIMIZER: _optimizer_files(engine, shards[OPTIMIZER], self.writers),
        }
        exchanges = {MODEL: _weight_exchange(engine), OPTIMIZER: _optimizer_exchange(engine, files[OPTIMIZER])}
        if outer := engine_state.outer_state(engine):
            shards[OUTER], files[OUTER] = outer, SharedFiles(_whole(outer), self.writers)
            exchanges[OUTER] = exchanges[OPTIMIZER]  # local steps are not for ZeRO
        self.compression = engine.grad_sync.wire.format
        if wire := engine_state.wire_state(engine):
            shards[WIRE] = wire
            files[WIRE], exchanges[WIRE] = _wire_files(engine, wire, self.writers)
        self._copies = {
            name: _Copy(world.rank, files[name], own, self.writers, exchanges[name]) for name, own in shards.items()
        }

    def take(self, step: int, state: Mapping[str, Any], texts: Mapping[str, str], best: bool) -> Snapshot:
        """A snapshot of the engine as it is now, in the memory of the last one. Collective.

        Training waits for no more than this. `state` goes into state.json, and `texts` are text files by name.
        """
        self.engine.wait_params()
        for copy in self._copies.values():
            copy.run()
        host = self.writers.hosts[self.engine.world.rank]
        copies = {} if host is None else {self.writers.file(name, host): copy for name, copy in self._copies.items()}
        return Snapshot(
            step=step,
            parts={file: copy.part for file, copy in copies.items()},
            state={"format": FORMAT, **state},
            best=best,
            texts=texts,
            indexes=lambda: self._indexes,
            writers=self.writers,
        )

    @cached_property
    def _indexes(self) -> dict[str, str]:
        """Made by the thread that writes, once: it lists each tensor, and with ZeRO each host's part of it."""
        return {
            file: text
            for name, copy in self._copies.items()
            for file, text in index(name, copy.files, self.writers).items()
        }


def _whole(shards: Shards) -> list[Piece]:
    return [Piece.of(name, own.values.dtype, own.shape) for name, own in shards.items()]


def _optimizer_files(engine: Engine, own: Shards, writers: Writers) -> Files:
    """With ZeRO each rank writes its shard, unless it sees no folder, or pieces of rows would have to be put together.

    Over several hosts pieces of rows are stored as they are.
    """
    mesh = engine.mesh
    if mesh.zero_shard.count == 1 or not writers.all_see or (mesh.tp > 1 and len(writers.ranks) == 1):
        return SharedFiles(_whole(own), writers)
    return ShardFiles(engine_state.columns(engine), own, writers)


class _Exchange(NamedTuple):
    """The ranks that have to exchange what they hold, and what each holds of a tensor."""

    group: Group
    held: Callable[[int, str], Held | None]


def _weight_exchange(engine: Engine) -> _Exchange | None:
    mesh = engine.mesh
    return _Exchange(mesh.tp_group, engine_state.held_by_tensor_group(engine)) if mesh.tp > 1 else None


def _optimizer_exchange(engine: Engine, files: Files) -> _Exchange | None:
    if isinstance(files, ShardFiles):
        return None
    found = _weight_exchange(engine)
    if engine.mesh.zero_shard.count > 1:
        found = _Exchange(engine.world, engine_state.held_by_world(engine))
    return found and _Exchange(found.group, lambda rank, name: found.held(rank, engine_state.parameter_of(name)))


def _wire_files(engine: Engine, own: Shards, writers: Writers) -> tuple[Files, _Exchange | None]:
    """Each rank writes its own errors, unless it sees no folder."""
    if writers.all_see:
        return ShardFiles(engine_state.wire_columns(engine, own), own, writers), None
    return SharedFiles(_whole(own), writers), _Exchange(engine.world, engine_state.held_by_places(engine, own))


class _Copy:
    """This rank's part of its host's file, and where in the engine it comes from."""

    def __init__(self, rank: int, files: Files, own: Shards, writers: Writers, swap: _Exchange | None) -> None:
        self.files, self._own, self._swap = files, own, swap
        spans = files.spans(rank)
        self.part, self._targets = _allocate(files, spans, writers, rank)
        if device := next((shard.values.device for shard in own.values() if has_streams(shard.values.device)), None):
            for _, block in self.part.blocks:
                _pin(block, device)
        # The engine's tensors stay where they are.
        self._pairs = [
            pair
            for span, target in zip(spans, self._targets, strict=True)
            for pair in overlap(target, own[span.piece.name])
        ]
        self._wanted = [files.spans(rank) for rank in swap.group.ranks] if swap else []

    def run(self) -> None:
        """Collective."""
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        for device in filter(has_streams, {source.device for _, source in self._pairs}):
            torch.cuda.current_stream(device).synchronize()  # from now on the host reads the copies
        if self._swap is not None:
            exchange(self._swap.group, self._own, self._swap.held, self._wanted, self._targets)


def _pin(block: torch.Tensor, device: torch.device) -> None:
    """Let a GPU write this memory itself, several times as fast. Where it may not, the memory stays as it is."""
    runtime, address = torch.cuda.cudart(), block.data_ptr()
    # Not torch's pinned memory: that is rounded up to a power of two.
    if not block.nbytes:
        return
    if int(runtime.cudaHostRegister(address, block.nbytes, 0)) == 0:
        weakref.finalize(block.untyped_storage(), runtime.cudaHostUnregister, address)
        return
    with suppress(RuntimeError):  # CUDA keeps the refusal, and the next kernel would raise it
        torch.zeros(1, device=device)


def _allocate(files: Files, spans: Sequence[Span], writers: Writers, rank: int) -> tuple[FilePart, list[TensorShard]]:
    """Memory for what the rank writes: spans that are neighbours in the file are in it, too."""
    host = writers.hosts[rank]
    if host is None:
        return FilePart([], [], leads=False), []
    pieces, places, position = files.pieces(host), {}, 0
    for piece in pieces:
        places[piece.name, piece.start, piece.blocks] = position
        position += piece.entry.nbytes
    runs: list[tuple[int, list[Span]]] = []
    stop = None
    for span in spans:
        piece, item = span.piece, span.piece.dtype.itemsize
        place = places[piece.name, piece.start, piece.blocks] + span.first * item
        if place != stop:
            runs.append((place, []))
        runs[-1][1].append(span)
        stop = place + (span.last - span.first) * item
    blocks, targets = [], []
    for place, run in runs:
        sizes = [(span.last - span.first) * span.piece.dtype.itemsize for span in run]
        block = torch.empty(sum(sizes), dtype=torch.uint8)
        blocks.append((place, block))
        for span, values in zip(run, block.split(sizes), strict=True):
            piece = span.piece
            values = values.view(piece.dtype)
            targets.append(TensorShard(piece.shape, piece.blocks, piece.start + span.first, values))
    leads = rank == writers.ranks[host][0]
    return FilePart([piece.entry for piece in pieces], blocks, leads), targets
