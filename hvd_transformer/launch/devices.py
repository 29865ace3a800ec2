"""Whether this host has a GPU for each stage of each of its ranks; what other hosts have is asked there."""

import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host


def check_devices(hosts: Sequence[Host], config: Config, environment: Mapping[str, str]) -> None:
    """Raises `UserError` where training.device=cuda needs more GPUs than this host shows.

    `auto` is never refused: with a GPU too few all ranks compute on the CPU.
    """
    here = [host for host in hosts if host.name in ("localhost", "127.0.0.1", socket.gethostname())]
    if not here or config.training.device != "cuda":
        return
    gpus = num_gpus(environment)
    stages = config.parallel.pipeline
    for host in here:
        if gpus is not None and host.slots * stages > gpus:
            needed = f"{host.slots} ranks × {stages} stages" if stages > 1 else f"{host.slots} ranks"
            raise UserError(
                f"host {host.name}: has {gpus} GPUs for {needed} (training.device=cuda); at most "
                f"{gpus // stages} ranks fit, or set training.device=cpu"
            )


def num_gpus(environment: Mapping[str, str]) -> int | None:
    """As CUDA_VISIBLE_DEVICES or the driver's tool says; None where neither does."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA ends its list at the first name that is none.
        return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10)
        if said.returncode == 0:
            return sum(line.startswith("GPU ") for line in said.stdout.splitlines())
    return None
