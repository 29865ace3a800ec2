"""Caches layer profiles on disk, so that a configuration is measured once per kind of machine.

They are stored under `data.cache_dir`, like everything that can be made again.
"""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hvd_transformer import __version__, atomic
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.own_folder import make_own_folder
from hvd_transformer.planning.layer_profile import LayerProfile
from hvd_transformer.planning.pass_memory import PassMemory, PassMode
from hvd_transformer.processor import processor_name

FORMAT = 5  # of the file and of the measurement; files of another format are ignored

log = logging.getLogger("hvd_transformer")


def file_for(
    config: Config,
    layers: Sequence[Layer],
    micro_batch: MicroBatch,
    device: torch.device,
    threads: int,
    recomputes: bool,
) -> Path:
    """The file of these profiles, named after everything that they depend on."""
    settings = {
        "format": FORMAT,
        "versions": [__version__, torch.__version__],
        "processor": processor_name(device),
        "threads": threads,
        "model": config.model.model_dump(mode="json"),
        "recomputes": recomputes,
        "precision": config.training.precision,
        "compile": config.training.compile,
        "micro_batch": [
            [list(tensor.shape), str(tensor.dtype)] for tensor in (*micro_batch.inputs, *micro_batch.targets)
        ],
        # The shapes of the weights imply the vocabulary size.
        "layers": [[layer.name, *(list(weight.shape) for weight in layer.module.parameters())] for layer in layers],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return Path(config.data.cache_dir).expanduser().absolute() / "layers" / f"{digest[:16]}.json"


def to_json(profile: LayerProfile) -> dict[str, Any]:
    """The profile as it is stored."""
    passes = [
        {"again": mode.recompute, "waits": mode.defer, **memory._asdict()} for mode, memory in profile.passes.items()
    ]
    return {**profile._asdict(), "passes": passes}


def _from_json(stored: dict[str, Any]) -> LayerProfile:
    passes = {PassMode(entry.pop("again"), entry.pop("waits")): PassMemory(**entry) for entry in stored.pop("passes")}
    return LayerProfile(**stored, passes=passes)


def write(file: Path, profiles: Sequence[LayerProfile]) -> None:
    """Write the profiles to the file; log a warning if that fails."""
    try:
        make_own_folder(file.parent)
        atomic.write_text(file, json.dumps([to_json(profile) for profile in profiles], indent=1) + "\n")
    except (OSError, UserError) as error:
        log.warning("layer profiles are not cached: %s", error)


def read(file: Path, num_layers: int) -> list[LayerProfile] | None:
    """Read the profiles from the file. Returns None if it is missing or damaged."""
    try:
        profiles = [_from_json(stored) for stored in json.loads(file.read_text(encoding="utf-8"))]
        numbers = [
            [profile.seconds, profile.weights, profile.hidden, profile.shadow, *chain(*profile.passes.values())]
            for profile in profiles
        ]
        valid = all(math.isfinite(value) and value >= 0 for value in chain(*numbers))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return profiles if valid and len(profiles) == num_layers else None
