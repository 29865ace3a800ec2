"""What training and evaluation share at the start, the same on every rank: data, task, compiled layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from hvd_transformer.comm.process_map import process_map
from hvd_transformer.comm.world import AgreedError, World
from hvd_transformer.config import Config
from hvd_transformer.config.batch_size import eval_samples
from hvd_transformer.config.schema import flatten
from hvd_transformer.data.build_once import ShouldStop
from hvd_transformer.data.sampler import Replica
from hvd_transformer.errors import UserError
from hvd_transformer.nn.kernel_library import CannotCompile, load_library
from hvd_transformer.nn.kernels import FusibleLayer, Kernels
from hvd_transformer.parallel.deferred_init import deferred_init
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.precision import weight_dtype
from hvd_transformer.parallel.tensor_parallel import Shapes, load_pieces, shard_model
from hvd_transformer.reporting.progress import ProgressDisplay
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import Data, EvaluationSpec, PrepareContext, Task
from hvd_transformer.training.compiled_blocks import compile_blocks, why_no_blocks
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.progress_rounds import agree_in_rounds


def check_same_configuration(config: Config, world: World) -> None:
    """Raise `UserError` with the first key in which a rank differs from rank 0. Collective."""
    own = flatten(config)
    first = world.broadcast_object(own)
    differences = (
        f"{key}: rank {world.rank} has {own[key]}, rank 0 has {value}; every rank needs the same configuration"
        for key, value in first.items()
        if own[key] != value
    )
    _raise_first(next(differences, None), world)


def prepare_data(
    config: Config,
    world: World,
    progress: ProgressDisplay,
    stop: StopRequest,
    wanted: EvaluationSpec | None = None,
) -> Data:
    """The data of a training, or only what is `wanted` for an evaluation. Collective.

    Raises `UserError` of any rank on all of them, `Stopped` if one was asked to stop.
    """

    def prepare(should_stop: ShouldStop) -> Data:
        with process_map(config.data.workers) as mapper:
            preparing = PrepareContext(mapper, progress.message, should_stop)
            if wanted is None:
                return task_class(config).prepare(config, preparing)
            return task_class(config).prepare_evaluation(config, preparing, wanted)

    return agree_in_rounds(prepare, world, stop)


def check_same_data(data: Data, world: World) -> None:
    """Raise `UserError` if hosts have different data. Collective."""
    host, digest = world.broadcast_object([world.host, data.digest])
    differs = f"data.source: host {world.host} has different data than host {host}; copy one to all hosts"
    _raise_first(None if data.digest == digest else differs, world)


def _raise_first(message: str | None, world: World) -> None:
    """Raise the message of the first rank that has one, on all ranks. Collective."""
    if (found := world.first_object(message)) is not None:
        rank, told = found
        raise AgreedError(told, rank)


def limited_evaluation(config: Config) -> str | None:
    """Message if evaluation sees only a part of the data; None if it sees all."""
    most = eval_samples(config.training)
    if most is None:
        return None
    chosen = config.training.eval_batches
    return f"training.eval_batches={chosen}: only the first {most:,} samples of a split are evaluated"


@contextmanager
def initial_weights(config: Config) -> Iterator[None]:
    """Modules made inside get the dtype of the job, and weights that depend on the seed only."""
    torch.manual_seed(config.seed)
    torch.set_default_dtype(weight_dtype(config.training.precision))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def make_task(config: Config, data: Data, mesh: ParallelMesh) -> Task:
    """The task as this rank's replica sees it, without its model unless it makes that at once."""
    with initial_weights(config):
        return task_class(config)(config, data, Replica(mesh.dp_rank, mesh.dp))


def build_model(config: Config, task: Task, mesh: ParallelMesh, *, draw: bool = True) -> Shapes:
    """Build this rank's part of the task's model. Returns the shapes of the unsplit weights that are trained.

    The weights are the same on any number of ranks; without `draw` they are zero, to be loaded.
    """
    has_model = "model" in vars(task)  # since its `__init__`

    def make() -> nn.Module:
        if not has_model:  # one may be there that has no values, and cannot get them
            vars(task).pop("model", None)
        return task.model

    with initial_weights(config):
        model, init = deferred_init(make)
        frozen, cuts = task.frozen, task.cuts
        if mesh.tp > 1 and not cuts:
            raise UserError(
                f"parallel.tensor={mesh.tp}: the model of task={config.task} has no `cuts`; each of these ranks would "
                "compute all of it"
            )
        if mesh.tp > 1 and (both := sorted(cuts.keys() & set(frozen))):
            raise UserError(f"parallel.tensor={mesh.tp}: {both[0]} is in `frozen` and in `cuts`; leave it out of one")
        # No checkpoint has the weights that are not trained: they are always those that the model begins with.
        read = task.stored_weights() if draw or frozen else None
        shapes = shard_model(model, cuts, mesh.tp_rank, mesh.tp, init, draw=(draw or bool(frozen)) and read is None)
    if read is not None:
        load_pieces(model, cuts, mesh.tp_rank, mesh.tp, read)
    for name, weight in model.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)
    return {name: shape for name, shape in shapes.items() if name not in frozen}


def compile_layers(config: Config, task: Task, mesh: ParallelMesh, world: World) -> str | None:
    """Compile what `training.compile` asks for: on a CPU the kernels of `nn.kernels`, on a GPU the blocks.

    Call when the weights are loaded. Returns why nothing is compiled, on any rank; None if all is well. Collective:
    ranks that repeat each other's work must compute it in the same way.
    """
    if not config.training.compile:
        return None
    on_gpu = mesh.device.type == "cuda"
    kernels, reason = (None, why_no_blocks(mesh)) if on_gpu else _kernels(config)
    if (found := world.first_object(reason)) is not None:
        rank, told = found
        return f"rank {rank}: {told}" if world.size > 1 else str(told)
    if kernels is None:
        compile_blocks(task)
    else:
        for module in task.model.modules():
            if isinstance(module, FusibleLayer):
                module.kernels = kernels
    return None


def _kernels(config: Config) -> tuple[Kernels | None, str | None]:
    """The kernels, or why there are none."""
    if config.training.precision != "fp32":
        return None, f"on a CPU it needs training.precision=fp32, not {config.training.precision}"
    try:
        return Kernels(load_library(Path(config.data.cache_dir).expanduser().absolute() / "kernels")), None
    except CannotCompile as error:
        return None, str(error)
