"""Who does what: which replica a rank is, and which device it computes on. The only place that knows."""

from dataclasses import dataclass

import torch

from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError


@dataclass(frozen=True)
class Layout:
    """world = dp replicas; each rank is one of them, on one device."""

    dp: int
    replica: int
    device: torch.device

    @classmethod
    def of(cls, config: Config, world: World) -> "Layout":
        """Checks the sizes against the world and this host; collective. Raises `UserError`."""
        if config.parallel.pipeline > 1:
            raise UserError(
                f"parallel.pipeline={config.parallel.pipeline}: this version trains on one device a rank; "
                "set parallel.pipeline=1"
            )
        return cls(dp=world.size, replica=world.rank, device=_device(config.training.device, world))


def _device(wanted: str, world: World) -> torch.device:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and num_gpus <= world.local_rank:
        raise UserError(
            f"training.device=cuda: host {world.host} has {num_gpus} GPUs for {world.local_size} ranks; "
            "start at most one rank a GPU, or set training.device=cpu"
        )
    if wanted == "auto":  # one GPU short anywhere and all ranks compute on the CPU
        wanted = "cuda" if all(world.all_gather_objects(num_gpus > world.local_rank)) else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device
