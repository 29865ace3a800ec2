"""Captures an engine's weights and optimizer state for a checkpoint, and restores them.

Files hold whole tensors by parameter name, of which each rank writes its shards: a checkpoint does not depend on how
parameters and optimizer state are split into buffers, stages, tensor groups and ZeRO shards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.checkpoint import tensor_file
from hvd_transformer.checkpoint.store import FORMAT, MODEL, OPTIMIZER, Snapshot, read_current_state
from hvd_transformer.checkpoint.tensor_file import StridedBlocks, TensorShard
from hvd_transformer.comm.world import World, agree
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.optimizer import state_keys
from hvd_transformer.parallel.engine import Engine

# Bytes that rank 0 reads and broadcasts at a time, unless a single row is larger.
CHUNK_BYTES = 32 << 20


def saving_ranks(engine: Engine) -> list[int]:
    """The ranks that write a part of a checkpoint: the first replica's, or all with a ZeRO-sharded optimizer."""
    mesh = engine.mesh
    return list(range(engine.world.size if mesh.zero_shard.count > 1 else mesh.tp))


def capture(engine: Engine, step: int, state: Mapping[str, Any], texts: Mapping[str, str], best: bool) -> Snapshot:
    """Copy this rank's part of a checkpoint to host memory. Training waits for no more than this.

    `state` goes into state.json, and `texts` are text files by name. The copies are assigned to named tensors when they
    are written.
    """
    saves = engine.mesh.dp_rank == 0 or engine.mesh.zero_shard.count > 1

    def copied(flats: Iterable[Tensor]) -> list[Tensor]:
        return [flat.to("cpu", copy=True) if saves else flat.new_empty(0) for flat in flats]

    weights = copied(buffer.own_parameters for buffer in engine.buffers)
    states = engine.optimizer_state()
    optimizer = {key: copied(state[key] for state in states) for key in state_keys(engine.config.optimizer)}
    return Snapshot(
        step=step,
        tensors={
            MODEL: _LazyShards(lambda: _saved_shards(engine, weights)),
            OPTIMIZER: _LazyShards(
                lambda: {
                    f"{key}.{name}": own
                    for key, flats in optimizer.items()
                    for name, own in _saved_shards(engine, flats).items()
                }
            ),
        },
        state={"format": FORMAT, **state},
        best=best,
        texts=texts,
    )


class _LazyShards(Mapping[str, TensorShard]):
    """Shards that are made on first access: in the thread that writes them."""

    def __init__(self, make: Callable[[], dict[str, TensorShard]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> dict[str, TensorShard]:
        return self._make()

    def __getitem__(self, name: str) -> TensorShard:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def read_checked(folder: Path | None, data_digest: str, world: World) -> dict[str, Any] | None:
    """The state of a checkpoint, read by rank 0 and sent to all. Collective.

    Raises `UserError` if the checkpoint has another format or was trained on other data.
    """

    def read() -> dict[str, Any] | None:
        if folder is None:
            return None
        state = read_current_state(folder)
        if state["data_digest"] != data_digest:
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
    shards = {
        f"{key}.{name}": own
        for key in state_keys(engine.config.optimizer)
        for name, own in _shards(engine, [state[key] for state in engine.optimizer_state()]).items()
    }
    _load(engine.world, folder and folder / OPTIMIZER, shards)
    engine.set_updates(num_updates)


def restore_weights(engine: Engine, folder: Path | None) -> None:
    """Load the weights from rank 0's `folder` into every rank. Collective."""
    engine.wait_params()
    shards = _shards(engine, [buffer.parameters for buffer in engine.buffers], whole=True)
    _load(engine.world, folder and folder / MODEL, shards)


def _shards(engine: Engine, flats: Iterable[Tensor], *, whole: bool = False) -> dict[str, TensorShard]:
    """This rank's shard of each parameter, as views of `flats`, one per buffer.

    They are laid out like the buffer's own part, or with `whole` like all of it.
    """
    result = {}
    for buffer, flat in zip(engine.buffers, flats, strict=True):
        first = 0 if whole else buffer.own.start
        last = first + flat.numel()
        for slot in buffer.slots:
            start, stop = max(slot.start, first), min(slot.stop, last)
            values = flat[start - first : stop - first] if start < stop else flat[:0]
            shape = tuple(engine.shapes[slot.name])
            blocks = StridedBlocks.of(shape, engine.splits.get(slot.name), engine.mesh.tp_rank, engine.mesh.tp)
            result[slot.name] = TensorShard(shape, blocks, max(0, start - slot.start), values)
    return result


def _saved_shards(engine: Engine, flats: Iterable[Tensor]) -> dict[str, TensorShard]:
    """The shard of each parameter that this rank saves: empty if another rank saves the same values."""
    found = _shards(engine, flats)
    if engine.mesh.tp_rank == 0:
        return found
    return {name: own if name in engine.splits else replace(own, values=own.values[:0]) for name, own in found.items()}


def _load(world: World, file: Path | None, shards: Mapping[str, TensorShard]) -> None:
    """Fill every rank's shards: rank 0 reads whole tensors, a few rows at a time, and broadcasts them. Collective."""
    shapes = {name: own.shape for name, own in shards.items()}
    agree(world, lambda: None if file is None else tensor_file.check(file, shapes))
    chunks = list(_chunks(shards))
    found = tensor_file.read(file, chain.from_iterable(chunks)) if file is not None else None
    for number, rows in enumerate(chunks):
        widths = {name: prod(shapes[name][1:]) for name, _, _ in rows}
        sizes = [(last - first) * widths[name] for name, first, last in rows]
        flat = torch.empty(sum(sizes), dtype=shards[rows[0][0]].values.dtype)
        if found is not None:
            torch.cat([values.flatten() for values in islice(found, len(rows))], out=flat)
        world.broadcast_(flat, f"load.{number % 4}")
        for (name, first, last), part in zip(rows, flat.split(sizes), strict=True):
            begin = first * widths[name]
            for place, run in shards[name].runs(begin, last * widths[name]):
                run.copy_(part[place - begin :][: run.numel()])


def _chunks(shards: Mapping[str, TensorShard]) -> Iterator[list[tuple[str, int, int]]]:
    """All rows of all whole tensors, in lists of (name, first row, last row exclusive) of about `CHUNK_BYTES`."""
    chunk: list[tuple[str, int, int]] = []
    room = CHUNK_BYTES
    for name, own in shards.items():
        width, first = prod(own.shape[1:]) * own.values.element_size(), 0
        while first < own.shape[0]:
            last = min(own.shape[0], first + max(room // width, 0 if chunk else 1))
            if last == first:
                yield chunk
                chunk, room = [], CHUNK_BYTES
                continue
            chunk.append((name, first, last))
            room -= (last - first) * width
            first = last
    if chunk:
        yield chunk
