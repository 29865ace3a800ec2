"""What a rank's engine holds of each tensor of a checkpoint, and what the engines of other ranks hold."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod

from torch import Tensor

from hvd_transformer.checkpoint.exchange import Held
from hvd_transformer.checkpoint.layout import BufferLayout, Column, Piece
from hvd_transformer.checkpoint.shards import StridedBlocks, TensorShard
from hvd_transformer.gradients.wire.feedback import ERROR
from hvd_transformer.parallel.engine import Engine

Shards = Mapping[str, TensorShard]  # by the name of the tensor
WIRE_KEY = "wire"


def weights(engine: Engine) -> Shards:
    """This rank's piece of each parameter: views."""
    return _shards(engine, [buffer.parameters for buffer in engine.buffers], whole=True)


def optimizer_state(engine: Engine) -> Shards:
    """This rank's shard of the optimizer state: views, by names such as "exp_avg.head.weight"."""
    states = engine.optimizer_state()
    return {
        f"{key}.{name}": own
        for key in sorted({key for state in states for key in state})  # in the same order on all ranks
        for name, own in _shards(engine, [state.get(key) for state in states]).items()
    }


def outer_state(engine: Engine) -> Shards:
    """This rank's piece of what local steps keep: views, by names such as "momentum.head.weight"; perhaps none."""
    states = engine.local_steps.state
    return {
        f"{key}.{name}": own
        for key in states[0]
        for name, own in _shards(engine, [state[key] for state in states]).items()
    }


def wire_state(engine: Engine) -> Shards:
    """State of the wire formats on this rank, by names such as "wire.0.error.head.weight". Collective.

    The number is the place in the tensor group. Each tensor is [dp, n] and has a row per rank of that place; this rank
    has one row of those of its own place, and nothing of others.
    """
    mesh, own = engine.mesh, engine.grad_sync.wire.tensors()
    found, nothing = {}, engine.buffers[0].parameters.new_empty(0)
    for place, sizes in enumerate(mesh.tp_group.all_gather_objects({name: own[name].numel() for name in own})):
        mine = place == mesh.tp_rank
        for name, size in sizes.items():
            start, values = (mesh.dp_rank * size, own[name]) if mine else (0, nothing)
            shape = (mesh.dp, size)
            found[f"{WIRE_KEY}.{place}.{name}"] = TensorShard(shape, StridedBlocks.of(shape), start, values)
    return found


def is_error(name: str) -> bool:
    """Whether this tensor of `wire_state` is of errors, of which only the sum over the ranks matters."""
    return name.split(".", 2)[2].startswith(ERROR)


def wire_columns(engine: Engine, state: Shards) -> list[Column]:
    """The ranks with the same place in their tensor groups, and what each of them keeps of `wire_state`."""
    mesh, dtype, found = engine.mesh, engine.buffers[0].parameters.dtype, []
    for place in range(mesh.tp):
        prefix = f"{WIRE_KEY}.{place}."
        shapes = {name.partition(".")[2]: own.shape for name, own in state.items() if name.startswith(prefix)}
        found.append(
            Column(
                range(place, engine.world.size, mesh.tp),
                [BufferLayout(size, [(name, 0, dp * size)]) for name, (dp, size) in shapes.items()],
                {name: Piece.of(name, dtype, shape) for name, shape in shapes.items()},
            )
        )
    return found


def parameter_of(name: str) -> str:
    """The parameter whose optimizer or outer state has this name."""
    return name.partition(".")[2]


def columns(engine: Engine) -> list[Column]:
    """The ranks with the same place in their tensor groups, for each place. Collective.

    The first saves what is equal on all.
    """
    mesh = engine.mesh
    own = [
        [buffer.own.stop - buffer.own.start, [[slot.name, slot.start, slot.stop] for slot in buffer.slots]]
        for buffer in engine.buffers
    ]
    return [
        Column(
            range(place, engine.world.size, mesh.tp),
            [BufferLayout(length, [(name, start, stop) for name, start, stop in slots]) for length, slots in buffers],
            {name: _piece(engine, name, place) for name in engine.shapes if place == 0 or name in engine.splits},
        )
        for place, buffers in enumerate(mesh.tp_group.all_gather_objects(own))  # those of other replicas are the same
    ]


def held_by_tensor_group(engine: Engine) -> Callable[[int, str], Held | None]:
    """The piece of a parameter that only this rank of the tensor group has."""

    def held(rank: int, name: str) -> Held | None:
        if name not in engine.splits:
            return None
        piece = _piece(engine, name, rank)
        return Held(piece.blocks, 0, piece.count)

    return held


def held_by_world(engine: Engine) -> Callable[[int, str], Held | None]:
    """The ZeRO shard of a parameter's optimizer state that a rank of the world saves. Collective."""
    tensor, of_places = engine.mesh.tp, columns(engine)

    @cache
    def shards(rank: int) -> dict[str, tuple[int, int]]:
        return of_places[rank % tensor].held(rank // tensor, rank // tensor + 1)

    def held(rank: int, name: str) -> Held | None:
        found = shards(rank).get(name)
        return found and Held(of_places[rank % tensor].pieces[name].blocks, *found)

    return held


def held_by_places(engine: Engine, state: Shards) -> Callable[[int, str], Held | None]:
    """The row of a tensor of `wire_state` that belongs to a rank of the world."""
    tensor = engine.mesh.tp

    def held(rank: int, name: str) -> Held | None:
        size, place = state[name].shape[1], int(name.split(".")[1])
        return Held(state[name].blocks, rank // tensor * size, size) if rank % tensor == place else None

    return held


def _shards(engine: Engine, flats: Iterable[Tensor | None], *, whole: bool = False) -> Shards:
    """This rank's shard of each parameter, as views of `flats`, one per buffer; None: not of that buffer's parameters.

    They are laid out like the buffer's own part, or with `whole` like all of it.
    """
    mesh, found = engine.mesh, {}
    for buffer, flat in zip(engine.buffers, flats, strict=True):
        if flat is None:
            continue
        first = 0 if whole else buffer.own.start
        last = first + flat.numel()
        for slot in buffer.slots:
            start, stop = max(slot.start, first), min(slot.stop, last)
            values = flat[start - first : stop - first] if start < stop else flat[:0]
            shape = tuple(engine.shapes[slot.name])
            blocks = StridedBlocks.of(shape, engine.splits.get(slot.name), mesh.tp_rank, mesh.tp)
            found[slot.name] = TensorShard(shape, blocks, max(0, start - slot.start), values)
    return {name: found[name] for name in engine.shapes if name in found}


def _piece(engine: Engine, name: str, tp_rank: int) -> Piece:
    """The piece of a parameter on a rank of the tensor group."""
    shape = tuple(engine.shapes[name])
    blocks = StridedBlocks.of(shape, engine.splits.get(name), tp_rank, engine.mesh.tp)
    return Piece(name, engine.buffers[0].parameters.dtype, shape, blocks, 0, blocks.before(prod(shape)))
