"""Captures an engine's weights and optimizer state: each rank copies what it writes of a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from hvd_transformer.checkpoint import engine_state
from hvd_transformer.checkpoint.engine_state import Shards
from hvd_transformer.checkpoint.exchange import Held, exchange
from hvd_transformer.checkpoint.layout import Files, Piece, ShardFiles, SharedFiles, Span, Writers, index
from hvd_transformer.checkpoint.shards import TensorShard, copy_overlap
from hvd_transformer.checkpoint.store import FORMAT, MODEL, OPTIMIZER, Snapshot
from hvd_transformer.checkpoint.tensor_file import FilePart
from hvd_transformer.checkpoint.writer import CopyMemory
from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.gradients.optimizer import state_keys
from hvd_transformer.parallel.engine import Engine


def capture(
    engine: Engine,
    step: int,
    state: Mapping[str, Any],
    texts: Mapping[str, str],
    best: bool,
    writers: Writers | None = None,
    memory: CopyMemory | None = None,
) -> Snapshot:
    """Copy what this rank writes of a checkpoint to host memory. Training waits for no more than this. Collective.

    `state` goes into state.json, and `texts` are text files by name. Without `writers` every rank sees the folder. The
    copies overwrite those of an earlier call with the same `memory`.
    """
    world = engine.world
    writers = writers or Writers.of(world.hosts, [True] * world.size)
    engine.wait_params()
    shards = {MODEL: engine_state.weights(engine), OPTIMIZER: engine_state.optimizer_state(engine)}
    files: dict[str, Files] = {
        MODEL: SharedFiles(_whole(shards[MODEL]), writers),
        OPTIMIZER: _optimizer_files(engine, shards[OPTIMIZER], writers),
    }
    exchanges = {MODEL: _weight_exchange(engine), OPTIMIZER: _optimizer_exchange(engine, files[OPTIMIZER])}
    memory = memory or CopyMemory()
    captured = {
        name: _capture(world, files[name], own, writers, exchanges[name], partial(memory.take, name))
        for name, own in shards.items()
    }
    host = writers.hosts[world.rank]
    return Snapshot(
        step=step,
        parts={writers.file(name, host): part for name, part in captured.items()} if host is not None else {},
        state={"format": FORMAT, **state},
        best=best,
        texts=texts,
        indexes=lambda: {file: text for name in files for file, text in index(name, files[name], writers).items()},
        writers=writers,
    )


def _whole(shards: Shards) -> list[Piece]:
    return [Piece.of(name, own.values.dtype, own.shape) for name, own in shards.items()]


def _optimizer_files(engine: Engine, own: Shards, writers: Writers) -> Files:
    """With ZeRO each rank writes its shard, unless it sees no folder, or pieces of rows would have to be put together.

    Over several hosts pieces of rows are stored as they are.
    """
    mesh = engine.mesh
    if mesh.zero_shard.count == 1 or not writers.all_see or (mesh.tp > 1 and len(writers.ranks) == 1):
        return SharedFiles(_whole(own), writers)
    return ShardFiles(engine_state.columns(engine), state_keys(engine.config.optimizer), writers)


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


_Take = Callable[[int], Tensor]


def _capture(
    world: World, files: Files, own: Shards, writers: Writers, swap: _Exchange | None, take: _Take
) -> FilePart:
    """This rank's part of its host's file, in memory that `take` gives. Collective."""
    spans = files.spans(world.rank)
    part, targets = _allocate(files, spans, writers, world.rank, take)
    for span, target in zip(spans, targets, strict=True):
        copy_overlap(target, own[span.piece.name])
    if swap is not None:
        exchange(swap.group, own, swap.held, [files.spans(rank) for rank in swap.group.ranks], targets)
    return part


def _allocate(
    files: Files, spans: Sequence[Span], writers: Writers, rank: int, take: _Take
) -> tuple[FilePart, list[TensorShard]]:
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
    sizes_of = [[(span.last - span.first) * span.piece.dtype.itemsize for span in run] for _, run in runs]
    memory = take(sum(map(sum, sizes_of))).split(list(map(sum, sizes_of)))
    for (place, run), sizes, block in zip(runs, sizes_of, memory, strict=True):
        blocks.append((place, block))
        for span, values in zip(run, block.split(sizes), strict=True):
            piece = span.piece
            values = values.view(piece.dtype)
            targets.append(TensorShard(piece.shape, piece.blocks, piece.start + span.first, values))
    leads = rank == writers.ranks[host][0]
    return FilePart([piece.entry for piece in pieces], blocks, leads), targets
