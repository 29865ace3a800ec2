"""Restores an engine's weights, optimizer state and errors of compressed gradients.

Each rank reads its part, where it sees the folder.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.checkpoint import engine_state
from hvd_transformer.checkpoint.engine_state import Shards
from hvd_transformer.checkpoint.shards import StridedBlocks, TensorShard
from hvd_transformer.checkpoint.shared_folder import SharedFolder
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, OUTER, WIRE, read_current_state
from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.comm.rounds import Advance, Rounds
from hvd_transformer.comm.world import World, agree
from hvd_transformer.errors import UserError
from hvd_transformer.parallel.engine import Engine

# Bytes that rank 0 reads and sends at a time to a rank that does not see the folder.
SEND_BYTES = 32 << 20
_Chunk = list[tuple[str, TensorShard]]  # with the names of the tensors


def read_checked(
    folder: Path | None, data_digest: str, split_digests: Mapping[str, str], world: World
) -> dict[str, Any] | None:
    """The state of a checkpoint, read by rank 0 and sent to all. Collective.

    `split_digests`: of the tokens of each split, where they are known. Equal ones will do: another version may describe
    the same tokens by another `data_digest`.

    Raises `UserError` if the checkpoint has another format or was trained on other data.
    """

    def read() -> dict[str, Any] | None:
        if folder is None:
            return None
        state = read_current_state(folder)
        same_tokens = split_digests and state.get("splits") == dict(split_digests)
        if state["data_digest"] != data_digest and not same_tokens:
            raise UserError(
                f"{folder}: trained on other data than data.source gives now; was it changed? Use another "
                "output_dir for a new run"
            )
        return state

    state: dict[str, Any] | None = world.broadcast_object(agree(world, read))
    return state


def restore(engine: Engine, folder: Path | None, num_updates: int) -> None:
    """Load weights and optimizer state from rank 0's `folder` into every rank. Collective."""
    restore_weights(engine, folder)
    _load(engine.world, folder, OPTIMIZER, engine_state.optimizer_state(engine))
    engine.set_updates(num_updates)
    engine.exchange_weights()  # the model's file has the averaged weights


def restore_outer_state(engine: Engine, folder: Path | None, num_steps: int) -> None:
    """Load what local steps keep, as it was after `num_steps` steps. Collective."""
    _load(engine.world, folder, OUTER, engine_state.outer_state(engine))
    engine.local_steps.restored(num_steps)


def restore_weights(engine: Engine, folder: Path | None) -> None:
    """Load the weights from rank 0's `folder` into every rank. Collective."""
    engine.wait_params()
    _load(engine.world, folder, MODEL, engine_state.weights(engine))


def restore_wire(engine: Engine, folder: Path | None) -> None:
    """Load what the format of gradients in transit keeps from rank 0's `folder`, as far as it is there. Collective.

    On another number of replicas the sum of their errors stays: replica r takes those of r, r + dp, r + 2 dp, …. With
    tensor groups of another size it starts without.
    """
    own, world, mesh = engine_state.wire_state(engine), engine.world, engine.mesh

    def read() -> dict[str, tuple[int, ...]]:
        if folder is None or not any((folder / name).is_file() for name in (WIRE, f"{WIRE}.index.json")):
            return {}
        stored = StoredTensors(folder, WIRE)
        return {name: stored.shape(name) for name in stored.names}

    found = world.broadcast_object(agree(world, read))
    if {name.split(".")[1] for name in found} != {name.split(".")[1] for name in own}:
        return
    known = {name: shard for name, shard in own.items() if name in found and found[name][1] == shard.shape[1]}
    saved = max((found[name][0] for name in known), default=0)
    for first in range(0, saved, mesh.dp):
        due = [name for name in known if first == 0 or engine_state.is_error(name)]
        rows = {name: first + mesh.dp_rank if engine_state.is_error(name) else 0 for name in due}
        parts = {name: _row(known[name], saved, row) for name, row in rows.items()}
        _load(world, folder, WIRE, parts, check=False)
        for name, part in parts.items():
            if part.values.numel():
                known[name].values.copy_(part.values if first == 0 else known[name].values + part.values)


def _row(own: TensorShard, num_rows: int, row: int) -> TensorShard:
    """Room for a row of a stored tensor, of which this rank has a row now; none if either has not."""
    shape = (num_rows, own.shape[1])
    values = torch.empty_like(own.values) if row < num_rows else own.values[:0]
    return TensorShard(shape, StridedBlocks.of(shape), row * values.numel(), values)


def _load(world: World, folder: Path | None, name: str, shards: Shards, *, check: bool = True) -> None:
    """Fill this rank's shards. Raises `UserError` on all ranks if the tensors are of another model. Collective."""
    shared = SharedFolder.of(world, folder)

    def read(advance: Advance) -> StoredTensors | None:
        if not shared.sees[world.rank]:
            return None
        stored = StoredTensors(shared.path, name)
        if check:
            stored.check({tensor: own.shape for tensor, own in shards.items()})
        for tensor, own in shards.items():
            stored.fill(tensor, own)
            advance()
        return stored

    stored = agree(world, lambda: Rounds(world).run(read))
    if all(shared.sees):
        return
    chunks = [] if shared.sees[world.rank] else list(_chunks(shards))
    counts = world.all_gather_async(torch.tensor([len(chunks)]), "load.chunks")().tolist()
    for rank, count in enumerate(counts):
        if count:
            _send(world, rank, count, chunks if rank == world.rank else [], stored, shards)


def _send(
    world: World, rank: int, count: int, chunks: list[_Chunk], stored: StoredTensors | None, shards: Shards
) -> None:
    """Fill the `count` chunks of `rank` with what rank 0 reads; the other ranks receive nothing. Collective.

    `shards` are each rank's own, with the same names and dtypes.
    """
    asking = [[[name, own.shape, astuple(own.blocks), own.start, own.stop] for name, own in chunk] for chunk in chunks]
    data = torch.frombuffer(bytearray(json.dumps(asking).encode()), dtype=torch.uint8)
    asked = world.send(data, rank, 0, "load.wanted")
    wanted: list[list[Any]] = json.loads(asked.numpy().tobytes()) if world.rank == 0 else []
    for number in range(count):
        flat = torch.empty(0, dtype=torch.uint8)
        if stored is not None and wanted:
            flat = torch.cat([_read(stored, shards[part[0]].values.dtype, *part) for part in wanted[number]])
        received = world.send(flat, 0, rank, "load.values")
        if chunks:
            sizes = [own.values.nbytes for _, own in chunks[number]]
            for (_, own), values in zip(chunks[number], received.split(sizes), strict=True):
                own.values.view(torch.uint8).copy_(values)


def _read(
    stored: StoredTensors, dtype: torch.dtype, name: str, shape: list[int], blocks: list[int], start: int, stop: int
) -> Tensor:
    """The bytes of the elements [start, stop) of a rank's piece of a tensor."""
    values = torch.empty(stop - start, dtype=dtype)
    stored.fill(name, TensorShard(tuple(shape), StridedBlocks(*blocks), start, values))
    return values.view(torch.uint8)


def _chunks(shards: Shards) -> Iterator[_Chunk]:
    """The shards in lists of about `SEND_BYTES`."""
    chunk: _Chunk = []
    room = SEND_BYTES
    for name, own in shards.items():
        start, values = own.start, own.values
        while values.numel():
            some = values[: max(1, room // values.element_size())]
            chunk.append((name, replace(own, start=start, values=some)))
            start, values, room = start + some.numel(), values[some.numel() :], room - some.nbytes
            if room <= 0:
                yield chunk
                chunk, room = [], SEND_BYTES
    if chunk:
        yield chunk
