"""The constants file, which several benchmarks complete: each keeps what the others have measured on this device."""

import datetime
from pathlib import Path

import torch

from hvd_transformer.bench.device import measure_device
from hvd_transformer.comm.world import World, agree
from hvd_transformer.planning.constants import Backend, Constants, Link, Scope, load, save
from hvd_transformer.planning.device_peak import device_name

_OF_THE_DEVICE = ("threads", "devices_per_host", "matmul", "memory_bandwidth", "memory_bytes")


def device_constants(file: Path, device: torch.device, world: World, *, anew: bool = False) -> Constants | None:
    """The constants of rank 0's file, if they are of its device, otherwise those of the device alone, measured now.

    `anew`: measure the device in any case. Only rank 0 reads, measures and has them: the other ranks wait. Collective.
    Raises `UserError` on all ranks if the file is not valid.
    """

    def read() -> Constants | None:
        if world.rank or not file.exists():
            return None
        found = load(str(file.absolute()))
        return found if found.device == device_name(device) else None

    known = agree(world, read)
    if world.rank == 0 and (known is None or anew):
        known = with_device(known, measure_device(device))
    world.barrier()
    return known


def with_device(known: Constants | None, measured: Constants) -> Constants:
    """What is known, with the device measured anew: its rates and its memory."""
    if known is None:
        return measured
    return known.model_copy(update={name: getattr(measured, name) for name in _OF_THE_DEVICE})


def with_link(constants: Constants, backend: Backend, scope: Scope, link: Link | None) -> Constants:
    """The constants with one link measured anew, unless it is None."""
    if link is None:
        return constants
    links = {**constants.links, backend: {**constants.links.get(backend, {}), scope: link}}
    return constants.model_copy(update={"links": links})


def write(constants: Constants, file: Path) -> None:
    """Write the file, atomically. Raises `UserError` if that fails."""
    today = datetime.date.today().isoformat()
    save(constants.model_copy(update={"origin": f"measured by hvd-transformer bench, last on {today}"}), file)
