"""Whether this host has a GPU for each stage of each of its ranks; what other hosts have is asked there."""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.ssh import is_local


def check_devices(hosts: Sequence[Host], config: Config, environment: Mapping[str, str]) -> None:
    """Raises `UserError` where this host has fewer GPUs than its ranks have stages.

    Also for training.device=auto, where it has any: all ranks would compute on the CPU then.
    """
    device, stages = config.training.device, config.parallel.pipeline
    if device == "cpu" or (gpus := num_gpus(environment)) is None or (device == "auto" and not gpus):
        return
    for host in hosts:
        if host.slots * stages > gpus and is_local(host.name):
            needed = f"{host.slots} ranks × {stages} stages" if stages > 1 else f"{host.slots} ranks"
            raise UserError(
                f"host {host.name}: has {gpus} GPUs for {needed} (training.device={device}); at most "
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
