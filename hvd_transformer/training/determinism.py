"""`training.deterministic`: runs that repeat bit for bit on a GPU, too."""

import os

import torch

from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# cuBLAS repeats its sums with a workspace of this kind only, says NVIDIA's manual ("Results reproducibility").
_REPEATABLE = (":4096:8", ":16:8")


def choose_kernels(config: Config) -> None:
    """Make torch use deterministic kernels, if the configuration asks for them. Call before CUDA starts.

    An operation that has none raises `RuntimeError` instead of other results each time. On a CPU nothing changes.
    Raises `UserError` if the environment asks cuBLAS for something else.
    """
    if not config.training.deterministic:
        return
    chosen = os.environ.setdefault(_CUBLAS, _REPEATABLE[0])
    if chosen not in _REPEATABLE:
        raise UserError(f"{_CUBLAS}={chosen}: with training.deterministic=true it must be {' or '.join(_REPEATABLE)}")
    torch.use_deterministic_algorithms(True)  # also the backward of attention
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # It would write NaN into all new memory, to find code that reads before it writes; that costs time in every step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
