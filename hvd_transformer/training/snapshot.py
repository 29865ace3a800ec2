"""A job's whole state as a checkpoint and back: weights, optimizer, loss scale, position in the data, best value.

Tensors are saved by parameter name, so a checkpoint does not depend on how parameters are laid out in buckets.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, Snapshot, read_state, read_tensors
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.parallel.flat import Bucket
from hvd_transformer.parallel.replicas import broadcast_parameters
from hvd_transformer.training.loop import Position, Trainer

FORMAT = 1


def take(trainer: Trainer, data_digest: str, checksum: int, best: bool) -> Snapshot:
    """Copies everything to host memory: all that training has to wait for."""
    copies = [bucket.parameters.to("cpu", copy=True) for bucket in trainer.buckets]
    model = {
        slot.name: slot.view(copy)
        for bucket, copy in zip(trainer.buckets, copies, strict=True)
        for slot in bucket.slots
    }
    states = [{key: flat.to("cpu", copy=True) for key, flat in state.items()} for state in trainer.optimizer_state()]
    return Snapshot(
        step=trainer.position.step,
        tensors={MODEL: model, OPTIMIZER: _by_name(trainer.buckets, states)},
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


def load(trainer: Trainer, folder: Path | None, state: dict[str, Any], world: World) -> None:
    """Weights and optimizer of a checkpoint: rank 0 reads, all get them. Collective."""
    load_weights(trainer.buckets, folder, world)
    flats = trainer.optimizer_state()

    def read() -> None:
        if folder is not None:
            read_tensors(folder / OPTIMIZER, _by_name(trainer.buckets, flats))

    agree(world, read)
    for index, flat in enumerate(flats):
        for key, tensor in flat.items():
            world.broadcast_(tensor, f"optimizer.{index}.{key}")
    trainer.optimizer_state_loaded()
    trainer.scaler.load(state["loss_scaler"])


def load_weights(buckets: Sequence[Bucket], folder: Path | None, world: World) -> None:
    """The weights of a checkpoint (rank 0's `folder`) on every rank. Collective."""

    def read() -> None:
        if folder is not None:
            names = {slot.name: slot.view(bucket.parameters) for bucket in buckets for slot in bucket.slots}
            read_tensors(folder / MODEL, names)

    agree(world, read)
    broadcast_parameters(buckets, world)


def _by_name(buckets: Sequence[Bucket], states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """{"exp_avg.blocks.0.norm1.weight": …}, views into the buckets' flat states."""
    return {
        f"{key}.{slot.name}": slot.view(flat)
        for bucket, state in zip(buckets, states, strict=True)
        for key, flat in state.items()
        for slot in bucket.slots
    }
