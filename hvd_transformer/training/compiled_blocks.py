"""torch.compile of a model's blocks, for GPUs: where it can work, and how many graphs there may be."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import torch

from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.tasks.task import Task

_MOST_GRAPHS = 64  # of a block's code, before torch.compile gives up on it


def compile_blocks(task: Task) -> None:
    """Compile each block of the task's model: it becomes graphs when it is first called."""
    from hvd_transformer.nn.compiled_dropout import set_dropout_keys

    assert task.model is not None
    set_dropout_keys(task.model)
    # The blocks of a model share their graphs: one each for training and for evaluation, for each shape.
    limit = {}
    if "recompile_limit" in signature(torch.compile).parameters:
        limit["recompile_limit"] = _MOST_GRAPHS
    # Without that argument. From torch 2.12 on this is of one thread: those of stages and of backward have their own.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    for layer in task.layers:
        if layer.recompute:  # a block
            layer.module.compile(**limit)


def why_no_blocks(mesh: ParallelMesh) -> str | None:
    """Why blocks cannot be compiled on this rank; None: they can."""
    if mesh.tp > 1:
        return "torch.compile cannot take layers that wait for other ranks (parallel.tensor)"
    # Triton makes the kernels, and compiles what starts them as an extension of Python.
    if find_spec("triton") is None:
        return "torch.compile needs the package triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "torch.compile finds no C compiler: install gcc, or set CC"
    include = Path(_include_folder())
    if not (include / "Python.h").is_file():
        return f"torch.compile needs Python.h in {include}: install python3-dev"
    return None


def _include_folder() -> str:
    """Where Triton looks for Python's headers."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)  # Debian's own
