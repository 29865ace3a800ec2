"""Chooses the device of each pipeline stage: GPUs that no other rank uses, or the CPU.

Ranks that see the same GPUs divide them in rank order. A rank that sees GPUs of its own starts at its device 0.

    GPUs that the ranks see    AB   AB     four ranks on two hosts; with one stage: A0, B1, …
    Slurm's --gpus-per-task    A    B      CUDA_VISIBLE_DEVICES differs per rank: A0, B0
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from hvd_transformer.comm.world import AgreedError, World
from hvd_transformer.errors import counted

# How CUDA_VISIBLE_DEVICES begins unless it hides all GPUs, as "-1", and Slurm's "NoDevFiles".
_VISIBLE = re.compile(r"\s*(\d+\s*(,|$)|GPU-|MIG-)", re.ASCII)


class Sight(NamedTuple):
    """What one rank knows: whether Horovod can send from a GPU there, and the GPUs that it sees."""

    can_send: bool
    gpus: tuple[int, ...]  # by device index, a number that names the GPU to all ranks
    present: int = 0  # GPUs of NVIDIA there, whether torch can use them or not


class Refusal(NamedTuple):
    """Why the job cannot compute on GPUs, which rank is to blame, and what helps."""

    rank: int
    why: str
    cure: str | None


def choose_devices(wanted: str, num_stages: int, world: World) -> tuple[tuple[torch.device, ...], str | None]:
    """The device of each stage of this rank; and a warning if `wanted="auto"` is the CPU although there are GPUs.

    Collective. Raises `UserError` on all ranks if `wanted="cuda"` is not possible.
    """
    on_cpu = (torch.device("cpu"),) * num_stages
    if wanted == "cpu":
        return on_cpu, None
    sights = _exchange(world)
    refusal = why_no_gpus(sights, num_stages, world.hosts)
    if refusal is None:
        first = first_devices(sights, num_stages)[world.rank]
        return tuple(torch.device("cuda", first + stage) for stage in range(num_stages)), None
    if wanted == "cuda":
        cures = ", or ".join(filter(None, (refusal.cure, "set training.device=cpu")))
        raise AgreedError(f"training.device=cuda: {refusal.why}; {cures}", refusal.rank)
    if not any(sight.gpus or sight.present for sight in sights):
        return on_cpu, None
    cure = "" if refusal.cure is None else f"; {refusal.cure}"
    return on_cpu, f"training.device=auto: all ranks compute on the CPU although there are GPUs: {refusal.why}{cure}"


def first_devices(sights: Sequence[Sight], num_stages: int) -> list[int]:
    """The device index of each rank's first stage: ranks that see the same GPUs take them in turn."""
    users: Counter[tuple[int, ...]] = Counter()
    found = []
    for sight in sights:
        found.append(users[sight.gpus] * num_stages)
        users[sight.gpus] += 1
    return found


def why_no_gpus(sights: Sequence[Sight], num_stages: int, hosts: Sequence[str]) -> Refusal | None:
    """Why the ranks cannot all compute on GPUs; None if they can. `hosts` are those of the ranks."""
    users: dict[int, int] = {}  # the rank of each GPU
    for rank, (sight, first) in enumerate(zip(sights, first_devices(sights, num_stages), strict=True)):
        own = sight.gpus[first : first + num_stages]
        if len(own) < num_stages:
            return _too_few(sights, rank, num_stages, hosts)
        for other in (users.setdefault(gpu, rank) for gpu in own):
            if other != rank:
                why = f"rank {other} on {hosts[other]} and rank {rank} on {hosts[rank]} would use the same GPU"
                return Refusal(rank, why, "let them see the same GPUs in the same order, or different ones")
    deaf = next((rank for rank, sight in enumerate(sights) if not sight.can_send), None)
    if len(sights) == 1 or deaf is None:
        return None
    why = f"Horovod on host {hosts[deaf]} cannot send from a GPU"
    return Refusal(deaf, why, "build it with HOROVOD_GPU_OPERATIONS=NCCL make install")


def _too_few(sights: Sequence[Sight], rank: int, num_stages: int, hosts: Sequence[str]) -> Refusal:
    host, there = hosts[rank], len(sights[rank].gpus)
    if not there and (present := sights[rank].present):
        why = f"torch on host {host} cannot use its {'GPU' if present == 1 else f'{present} GPUs'}"
        return Refusal(rank, why, "see `python -c 'import torch; torch.cuda.init()'` there")
    ranks = sum(of == host and other.gpus == sights[rank].gpus for of, other in zip(hosts, sights, strict=True))
    needed = f"{counted(ranks, 'rank')}{f' × {num_stages} stages' if num_stages > 1 else ''}"
    most = there // num_stages
    cure = f"start at most {counted(most, 'rank')} there" if most else None
    has = "1 GPU for" if there == 1 else f"{there} GPUs for"
    return Refusal(rank, f"host {host} has {has} {needed}", cure)


def _exchange(world: World) -> list[Sight]:
    """Gather what each rank knows. Collective: one all-gather."""
    gpus = _visible_gpus()
    own = torch.tensor([len(gpus), world.sends_from_gpus, *gpus, _num_present()], dtype=torch.int64)
    numbers = iter(world.all_gather_async(own, "devices")().tolist())
    return [
        Sight(bool(next(numbers)), tuple(next(numbers) for _ in range(count)), next(numbers))
        for count in (next(numbers) for _ in range(world.size))
    ]


def _visible_gpus() -> list[int]:
    """A number per GPU that this process sees, a hash of its UUID."""
    if not torch.cuda.is_available():
        return []
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    return [int.from_bytes(blake2b(uuid.encode(), digest_size=8).digest(), "big", signed=True) for uuid in uuids]


def _num_present(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA's GPUs, unless they are hidden on purpose."""
    if not _VISIBLE.match(os.environ.get("CUDA_VISIBLE_DEVICES", "0")):
        return 0
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*"))
