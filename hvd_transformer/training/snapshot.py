"""A job's whole state as a checkpoint and back: weights, optimizer, loss scale, position in the data, best value.

Whole tensors are saved, by parameter name: a checkpoint does not depend on how parameters are laid out in buckets,
stages and shares.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, Snapshot, read_state, stream_tensors
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.parallel.tensor import join, piece
from hvd_transformer.training.loop import Trainer
from hvd_transformer.training.optimizer import state_keys
from hvd_transformer.training.position import Position

FORMAT = 1
# Read and sent to the other ranks at a time, unless one tensor alone is larger.
_CHUNK_BYTES = 32 << 20


def take(trainer: Trainer, data_digest: str, checksum: int, best: bool) -> Snapshot:
    """Copies everything to host memory: all that training has to wait for. Collective within a tensor group."""
    optimizer: dict[str, Tensor] = {}
    for key in state_keys(trainer.config.optimizer):
        flats = [state[key] for state in trainer.optimizer_state()]
        optimizer |= {f"{key}.{name}": tensor for name, tensor in _whole(trainer, flats).items()}
    return Snapshot(
        step=trainer.position.step,
        tensors={MODEL: _whole(trainer, [bucket.parameters for bucket in trainer.buckets]), OPTIMIZER: optimizer},
        state={
            "format": FORMAT,
            "task": trainer.config.task,
            "config": flatten(trainer.config),
            "data_digest": data_digest,
            "dp": trainer.layout.dp,
            "weights_checksum": checksum,
            "position": trainer.position.state(),
            "loss_scaler": trainer.scaler.state(),
        },
        best=best,
    )


def read_position(folder: Path | None, data_digest: str, world: World) -> tuple[Position, dict[str, Any] | None]:
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
    return (Position(), None) if state is None else (Position.load(state["position"]), state)


def load(trainer: Trainer, folder: Path | None, state: dict[str, Any]) -> None:
    """Weights and optimizer of a checkpoint: rank 0 reads, all get them. Collective."""
    load_weights(trainer, folder)
    places = {
        f"{key}.{name}": tensor
        for key in state_keys(trainer.config.optimizer)
        for name, tensor in _by_name(trainer, [state[key] for state in trainer.optimizer_state()]).items()
    }
    _load(trainer, folder and folder / OPTIMIZER, places)
    trainer.optimizer_state_loaded()
    trainer.scaler.load(state["loss_scaler"])


def load_weights(trainer: Trainer, folder: Path | None) -> None:
    """The weights of a checkpoint (rank 0's `folder`) on every rank. Collective."""
    places = _by_name(trainer, [bucket.parameters for bucket in trainer.buckets])
    _load(trainer, folder and folder / MODEL, places)


def _by_name(trainer: Trainer, flats: Iterable[Tensor]) -> dict[str, Tensor]:
    """This rank's part of each parameter, as views into tensors like its buckets."""
    return {
        slot.name: slot.view(flat) for bucket, flat in zip(trainer.buckets, flats, strict=True) for slot in bucket.slots
    }


def _whole(trainer: Trainer, flats: Iterable[Tensor]) -> dict[str, Tensor]:
    """The whole of each parameter, in host memory."""
    group, result = trainer.layout.tensor_group, {}
    for name, own in _by_name(trainer, [flat.to("cpu", copy=True) for flat in flats]).items():
        result[name] = own
        if group.size > 1 and (cut := trainer.task.cuts.get(name)) is not None:
            empty = torch.empty(trainer.shapes[name], device="meta")
            shapes = [piece(empty, cut, index, group.size).shape for index in range(group.size)]
            joined = group.all_gather_async(own.flatten(), f"save.{name}")()
            parts = joined.split([shape.numel() for shape in shapes])
            result[name] = join([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], cut)
    return result


def _load(trainer: Trainer, file: Path | None, places: Mapping[str, Tensor]) -> None:
    """Rank 0 reads whole tensors, a few at a time, and each rank takes its part of them."""
    world, layout, cuts = trainer.world, trainer.layout, trainer.task.cuts
    parameter = {name: name if name in trainer.shapes else name.partition(".")[2] for name in places}
    shapes = {name: trainer.shapes[parameter[name]] for name in places}
    stream = agree(world, lambda: None if file is None else stream_tensors(file, shapes))
    for number, names in enumerate(
        _chunks({name: places[name].element_size() * shapes[name].numel() for name in places})
    ):
        sizes = [shapes[name].numel() for name in names]
        flat = torch.empty(sum(sizes), dtype=places[names[0]].dtype)
        if stream is not None:
            for part in flat.split(sizes):
                part.copy_(next(stream)[1].flatten())
        world.broadcast_(flat, f"load.{number % 4}")
        for name, part in zip(names, flat.split(sizes), strict=True):
            whole, cut = part.view(shapes[name]), cuts.get(parameter[name])
            places[name].copy_(whole if cut is None else piece(whole, cut, layout.shard, layout.tp))


def _chunks(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > _CHUNK_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
