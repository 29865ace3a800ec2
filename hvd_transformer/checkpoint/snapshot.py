"""A job's whole state as a checkpoint and back: weights, optimizer, loss scale, position in the data, best value.

Whole tensors are saved, by parameter name, each rank its fragments of them: a checkpoint does not depend on how
parameters and optimizer state are laid out in buckets, stages, shares and shards.
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
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, Snapshot, read_state
from hvd_transformer.checkpoint.tensor_file import TensorShard
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.optimizer import state_keys
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

FORMAT = 2
# Read and sent to the other ranks at a time, unless one row alone is larger.
CHUNK_BYTES = 32 << 20


def savers(trainer: Trainer) -> list[int]:
    """The ranks that have a part of a checkpoint: those of the first replica, or all where replicas share a state."""
    layout = trainer.layout
    return list(range(trainer.world.size if layout.update_shard.count > 1 else layout.tp))


def capture(trainer: Trainer, data_digest: str, checksum: int, best: bool) -> Snapshot:
    """Copies this rank's part of everything to host memory: all that training has to wait for.

    Which numbers belong to which tensor is worked out when the copies are written.
    """
    mine = trainer.layout.replica == 0 or trainer.layout.update_shard.count > 1

    def copied(flats: Iterable[Tensor]) -> list[Tensor]:
        return [flat.to("cpu", copy=True) if mine else flat.new_empty(0) for flat in flats]

    weights = copied(bucket.own_parameters for bucket in trainer.buckets)
    states = trainer.optimizer_state()
    optimizer = {key: copied(state[key] for state in states) for key in state_keys(trainer.config.optimizer)}
    return Snapshot(
        step=trainer.position.step,
        tensors={
            MODEL: _Later(lambda: _saved(trainer, weights)),
            OPTIMIZER: _Later(
                lambda: {
                    f"{key}.{name}": own
                    for key, flats in optimizer.items()
                    for name, own in _saved(trainer, flats).items()
                }
            ),
        },
        state={
            "format": FORMAT,
            "task": trainer.config.task,
            "config": flatten(trainer.config),
            "data_digest": data_digest,
            "splits": getattr(trainer.task.data, "split_digests", {}),
            "dp": trainer.layout.dp,
            "weights_checksum": checksum,
            "position": trainer.position.state(),
            "loss_scaler": trainer.scaler.state(),
            **trainer.task.facts,
        },
        best=best,
        texts={**trainer.task.files, **trainer.tokenizer_files},
    )


class _Later(Mapping[str, TensorShard]):
    """Fragments that are made when the first of them is asked for: by the thread that writes them."""

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


def read_position(folder: Path | None, data_digest: str, world: World) -> tuple[TrainState, dict[str, Any] | None]:
    """Where the job goes on, and the rest of the state: rank 0 reads, all get it. Collective."""

    def read() -> dict[str, Any] | None:
        if folder is None:
            return None
        state = read_state(folder)
        if state.get("format") != FORMAT:
            raise UserError(f"{folder}: format {state.get('format')}, but this version reads format {FORMAT}")
        if state["data_digest"] != data_digest:
            raise UserError(
                f"{folder}: trained on other tokens than data.source gives now; was the text changed? Use another "
                "output_dir for a new run"
            )
        return state

    state = world.broadcast_object(agree(world, read))
    return (TrainState(), None) if state is None else (TrainState.load(state["position"]), state)


def restore(trainer: Trainer, folder: Path | None, state: dict[str, Any]) -> None:
    """Weights and optimizer of a checkpoint: rank 0 reads, all get their parts. Collective."""
    load_weights(trainer, folder)
    places = {
        f"{key}.{name}": own
        for key in state_keys(trainer.config.optimizer)
        for name, own in _shards(trainer, [state[key] for state in trainer.optimizer_state()]).items()
    }
    _load(trainer, folder and folder / OPTIMIZER, places)
    trainer.optimizer_state_loaded()
    trainer.scaler.load(state["loss_scaler"])


def load_weights(trainer: Trainer, folder: Path | None) -> None:
    """The weights of a checkpoint (rank 0's `folder`) on every rank. Collective."""
    trainer.settle()
    places = _fragments(trainer, [(bucket.parameters, 0) for bucket in trainer.buckets])
    _load(trainer, folder and folder / MODEL, places)


def _shards(trainer: Trainer, flats: Iterable[Tensor]) -> dict[str, TensorShard]:
    """This rank's part of each parameter, in tensors like the shards of its buckets."""
    return _fragments(trainer, [(flat, bucket.own.start) for bucket, flat in zip(trainer.buckets, flats, strict=True)])


def _fragments(trainer: Trainer, flats: Iterable[tuple[Tensor, int]]) -> dict[str, TensorShard]:
    """This rank's part of each parameter, in parts of its buckets, each with its start."""
    result = {}
    for bucket, (flat, first) in zip(trainer.buckets, flats, strict=True):
        last = first + flat.numel()
        for slot in bucket.slots:
            start, stop = max(slot.start, first), min(slot.stop, last)
            values = flat[start - first : stop - first] if start < stop else flat[:0]
            shape, blocks = trainer.pieces[slot.name]
            result[slot.name] = TensorShard(shape, blocks, max(0, start - slot.start), values)
    return result


def _saved(trainer: Trainer, flats: Iterable[Tensor]) -> dict[str, TensorShard]:
    """What this rank saves of each parameter; of what several ranks have, only the first has any."""
    found = _shards(trainer, flats)
    if trainer.layout.shard == 0:
        return found
    return {name: own if name in trainer.cuts else replace(own, values=own.values[:0]) for name, own in found.items()}


def _load(trainer: Trainer, file: Path | None, places: Mapping[str, TensorShard]) -> None:
    """Rank 0 reads whole tensors, some rows at a time, and each rank takes its part of them."""
    shapes = {name: own.shape for name, own in places.items()}
    agree(trainer.world, lambda: None if file is None else tensor_file.check(file, shapes))
    chunks = list(_chunks(places))
    found = tensor_file.read(file, chain.from_iterable(chunks)) if file is not None else None
    for number, rows in enumerate(chunks):
        widths = {name: prod(shapes[name][1:]) for name, _, _ in rows}
        sizes = [(last - first) * widths[name] for name, first, last in rows]
        flat = torch.empty(sum(sizes), dtype=places[rows[0][0]].values.dtype)
        if found is not None:
            torch.cat([values.flatten() for values in islice(found, len(rows))], out=flat)
        trainer.world.broadcast_(flat, f"load.{number % 4}")
        for (name, first, last), part in zip(rows, flat.split(sizes), strict=True):
            begin = first * widths[name]
            for place, run in places[name].runs(begin, last * widths[name]):
                run.copy_(part[place - begin :][: run.numel()])


def _chunks(places: Mapping[str, TensorShard]) -> Iterator[list[tuple[str, int, int]]]:
    """All rows of all tensors, as [(name, first, last)] of about `CHUNK_BYTES`."""
    chunk: list[tuple[str, int, int]] = []
    room = CHUNK_BYTES
    for name, own in places.items():
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
