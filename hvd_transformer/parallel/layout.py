"""Who does what: which replica a rank is, and which device it computes on. The only place that knows."""

from dataclasses import dataclass

import torch

from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError


@dataclass(frozen=True)
class Layout:
    """world = dp replicas; each rank is one of them, on one device a pipeline stage."""

    dp: int
    replica: int
    devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, config: Config, world: World) -> "Layout":
        """Checks the sizes against the world and this host; collective. Raises `UserError`."""
        return cls(
            dp=world.size,
            replica=world.rank,
            devices=_devices(config.training.device, config.parallel.pipeline, world),
        )

    @property
    def device(self) -> torch.device:
        """The first stage's."""
        return self.devices[0]


def _devices(wanted: str, num_stages: int, world: World) -> tuple[torch.device, ...]:
    """Stage s of local rank r: GPU r × stages + s, or the CPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = world.local_rank * num_stages
    enough = num_gpus >= first + num_stages
    if wanted == "cuda" and not enough:
        needed = f"{world.local_size} ranks × {num_stages} stages" if num_stages > 1 else f"{world.local_size} ranks"
        raise UserError(
            f"training.device=cuda: host {world.host} has {num_gpus} GPUs for {needed}; "
            f"start at most {num_gpus // num_stages} ranks there, or set training.device=cpu"
        )
    if wanted == "auto":  # one GPU short anywhere and all ranks compute on the CPU
        wanted = "cuda" if all(world.all_gather_objects(enough)) else "cpu"
    if wanted == "cpu":
        return (torch.device("cpu"),) * num_stages
    devices = tuple(torch.device("cuda", first + stage) for stage in range(num_stages))
    torch.cuda.set_device(devices[0])
    return devices
