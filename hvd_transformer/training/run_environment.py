"""Where a run runs: packages, hosts, devices. It goes into the log and, as `env`, into summary.json."""

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from hvd_transformer import __version__
from hvd_transformer.comm.horovod_env import usable_cores
from hvd_transformer.comm.world import World
from hvd_transformer.config import Config
from hvd_transformer.errors import counted
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.processor import number_formats, processor_name

_IF_USED = ("horovod", "mpi4py", "transformers")


def run_environment(world: World, mesh: ParallelMesh) -> dict[str, Any]:
    """The packages of rank 0, and all hosts, those that are alike together; empty on other ranks. Collective.

    Call when the model is loaded: a package counts as used when it is imported.
    """
    devices = [processor_name(device) for device in dict.fromkeys(mesh.devices) if device.type != "cpu"]
    cpu, formats = processor_name(torch.device("cpu")), number_formats()
    own = {"cpu": cpu, "number_formats": formats, "cores": usable_cores(), "devices": devices}
    found = world.gather_objects(own)
    if not found:
        return {}
    by_host: dict[str, dict[str, Any]] = {}
    for host, of_rank in zip(world.hosts, found, strict=True):
        if host in by_host:
            by_host[host]["devices"] += of_rank["devices"]
            by_host[host]["ranks"] += 1
        else:
            by_host[host] = {"ranks": 1, **of_rank}
    alike: list[dict[str, Any]] = []
    for host, values in by_host.items():
        group = next((group for group in alike if {**values, "names": group["names"]} == group), None)
        if group is None:
            alike.append({"names": [host], **values})
        else:
            group["names"].append(host)
    return {"packages": _packages(), "hosts": alike}


def slow_precision(config: Config, mesh: ParallelMesh, environment: Mapping[str, Any]) -> str | None:
    """Warning if CPUs compute more slowly in 16 bits than in 32; None otherwise, and on ranks other than 0."""
    precision = config.training.precision
    if mesh.device.type != "cpu" or precision not in ("bf16", "fp16") or not environment:
        return None
    without = [group["names"] for group in environment["hosts"] if precision not in group["number_formats"]]
    names = [name for group in without for name in group]
    if not names:
        return None
    where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return f"training.precision={precision} is slower than fp32 on {where}: no {precision} instructions in the CPU"


def _packages() -> dict[str, str]:
    """Versions by name."""
    found = {"hvd-transformer": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return found | {name: _version(name) for name in _IF_USED if name in sys.modules}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # imported from a folder
        return "unknown"


def environment_lines(environment: Mapping[str, Any]) -> list[str]:
    """The environment as lines for the log."""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    return [f"packages: {packages}", *map(_host_line, environment["hosts"])]


def _host_line(host: Mapping[str, Any]) -> str:
    names, devices = host["names"], host["devices"]
    counts = [f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices)]
    words = [counted(host["ranks"], "rank"), counted(host["cores"], "core"), host["cpu"], *counts]
    return f"{'host' if len(names) == 1 else 'hosts'} {', '.join(names)}: {', '.join(words)}"
