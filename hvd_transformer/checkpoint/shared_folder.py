"""What ranks do together with a checkpoint's folder that rank 0 sees, and perhaps not all others."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from hvd_transformer.checkpoint import manifest
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint, Verify
from hvd_transformer.comm.rounds import Advance, Rounds
from hvd_transformer.comm.world import World
from hvd_transformer.errors import UserError

Result = TypeVar("Result")


class SharedFolder(NamedTuple):
    """Rank 0's folder, and whether each rank sees it."""

    path: Path
    sees: list[bool]

    @classmethod
    def of(cls, world: World, folder: Path | None) -> "SharedFolder":
        """Rank 0's `folder`, on all ranks. Collective."""
        told = world.broadcast_object(_describe(folder) if world.rank == 0 and folder is not None else None)
        return cls._from(world, told)

    @classmethod
    def _from(cls, world: World, told: list[Any]) -> "SharedFolder":
        path = Path(told[0])
        return cls(path, seen_by(world, world.rank == 0 or None not in told and _describe(path) == told))


def seen_by(world: World, sees: bool) -> list[bool]:
    """Whether each rank sees a folder. Collective."""
    return list(map(bool, world.all_gather_async(torch.tensor([sees], dtype=torch.uint8), "folder.seen")().tolist()))


def with_verification(world: World, action: Callable[[Verify], Result]) -> Result | None:
    """Run `action` on rank 0; each folder that it verifies is verified by all ranks that see it, a part by each.

    Returns its result, on other ranks None. Collective.
    """
    if world.rank == 0:
        try:
            result = action(lambda folder: _verify(world, _describe(folder)))
        except UserError:
            world.broadcast_object(None)
            raise
        world.broadcast_object(None)
        return result
    while (told := world.broadcast_object(None)) is not None:
        try:
            _verify(world, told)
        except UserError:
            continue  # rank 0 decides what to do
    return None


def _verify(world: World, told: list[Any]) -> None:
    """Verify a folder that rank 0 describes. Raises what `manifest.verify` raised, on all ranks. Collective."""
    if world.rank == 0:
        world.broadcast_object(told)
    found = SharedFolder._from(world, told)

    def problem_of(advance: Advance) -> tuple[bool, str] | None:
        if not found.sees[world.rank]:
            return None
        try:
            manifest.verify(found.path, sum(found.sees[: world.rank]), sum(found.sees), advance=advance)
        except UserError as error:
            return isinstance(error, DamagedCheckpoint), str(error)
        return None

    first = world.first_object(Rounds(world).run(problem_of))
    if first is not None:
        is_damaged, message = first[1]
        raise (DamagedCheckpoint if is_damaged else UserError)(message)


def _describe(folder: Path) -> list[Any]:
    """What tells a folder from one of another disk with the same path: as JSON, equal on all who see the same."""
    path = folder.resolve()
    try:
        file = path / manifest.NAME
        found = file.stat()
        return [str(path), found.st_ino, found.st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest()]
    except OSError:
        return [str(path), None, None, None]
