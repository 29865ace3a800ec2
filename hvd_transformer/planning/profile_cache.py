"""Keeps the measured costs of layers on disk, so that a configuration is measured once a kind of machine.

They lie under `data.cache_dir`, like all that can be made again: nothing is written where the user did not say so.
"""

import hashlib
import json
import logging
import math
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hvd_transformer import __version__, atomic
from hvd_transformer.config.schema import Config
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.planning.layer_profile import LayerProfile, PassMemory

FORMAT = 2  # of the file and of what is measured; another number measures anew

log = logging.getLogger("hvd_transformer")


def cached_costs(
    config: Config,
    layers: Sequence[Layer],
    micro_batch: MicroBatch,
    device: torch.device,
    threads: int,
    measure: Callable[[], list[LayerProfile]],
) -> tuple[list[LayerProfile], bool]:
    """What `measure` found, now or before (the second value) for all that its result depends on."""
    settings = json.dumps(_settings(config, layers, micro_batch, device, threads), sort_keys=True)
    name = f"{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"
    file = Path(config.data.cache_dir).expanduser().absolute() / "layers" / name
    found = _read(file, len(layers))
    if found is not None:
        return found, True
    costs = measure()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps([record(cost) for cost in costs], indent=1) + "\n")
    except OSError as error:
        log.warning("measured layers are not kept: %s: %s", file, error.strerror)
    return costs, False


def _settings(
    config: Config, layers: Sequence[Layer], micro_batch: MicroBatch, device: torch.device, threads: int
) -> dict[str, Any]:
    """All that the costs depend on. The weights' shapes tell the size of the vocabulary."""
    return {
        "format": FORMAT,
        "versions": [__version__, torch.__version__],
        "processor": _processor(device),
        "threads": threads,
        "model": config.model.model_dump(mode="json"),
        "recompute": config.parallel.recompute,
        "precision": config.training.precision,
        "compile": config.training.compile,
        "micro_batch": [
            [list(tensor.shape), str(tensor.dtype)] for tensor in (*micro_batch.inputs, *micro_batch.targets)
        ],
        "layers": [[layer.name, *(list(weight.shape) for weight in layer.module.parameters())] for layer in layers],
    }


def _processor(device: torch.device) -> str:
    """The kind of GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # only Linux has it; the standard library knows no more than the architecture there
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def record(cost: LayerProfile) -> dict[str, Any]:
    """A layer's costs as JSON has them."""
    passes = [{"again": again, "waits": waits, **found._asdict()} for (again, waits), found in cost.passes.items()]
    return {**cost._asdict(), "passes": passes}


def _layer(record: dict[str, Any]) -> LayerProfile:
    passes = {(found.pop("again"), found.pop("waits")): PassMemory(**found) for found in record.pop("passes")}
    return LayerProfile(**record, passes=passes)


def _read(file: Path, num_layers: int) -> list[LayerProfile] | None:
    """What is in the file; None where it is missing or damaged."""
    try:
        costs = [_layer(record) for record in json.loads(file.read_text(encoding="utf-8"))]
        numbers = [[cost.seconds, cost.weights, *chain(*cost.passes.values())] for cost in costs]
        whole = all(math.isfinite(value) and value >= 0 for value in chain(*numbers))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return costs if whole and len(costs) == num_layers else None
