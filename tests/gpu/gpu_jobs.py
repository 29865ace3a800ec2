"""Jobs in this process on one GPU, which all stages of a pipeline share."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jobs import lines, steps

from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.parallel import mesh
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.train_job import run

# For `training.deterministic=true`, which sets it too late after another test's first product: cuBLAS reads it then.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _one_gpu(wanted: str, num_stages: int, world: World) -> tuple[tuple[torch.device, ...], None]:
    return (torch.device("cuda", 0),) * num_stages, None


def train(folder: Path, *words: str) -> Path:
    """hvd-train on the GPU, a world of one; returns the run's folder."""
    config = load(overrides=[*words, "training.device=cuda", f"output_dir={folder}"])
    with patch.object(mesh, "choose_devices", _one_gpu):
        run(config, World(), StopRequest())
    return folder


def losses(run_folder: Path) -> list[float]:
    """Of each step."""
    return [loss for _, loss in steps(run_folder, "loss")]


def evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of evaluations."""
    return [line for line in lines(run_folder) if "valid_loss" in line]
