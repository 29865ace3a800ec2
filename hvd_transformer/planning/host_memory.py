"""Estimates the memory of the host that a rank takes: schedulers give a job what it asks for and no more."""

from collections.abc import Sequence

from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.planning.memory_estimate import MemoryEstimate
from hvd_transformer.planning.memory_plan import StageCost, known_vocabulary, make_plan
from hvd_transformer.planning.model_costs import for_gpu
from hvd_transformer.planning.partition import check_partition

# Of Python, torch, Horovod and the data that a rank reads; with CUDA also the driver's and NCCL's.
_LIBRARIES_CPU = 512 << 20
_LIBRARIES_CUDA = 4 << 30
_MANY_WORDS = 50_000  # where only the data tells the size of the vocabulary


def host_memory(config: Config, num_ranks: int) -> int:
    """Bytes that each of the job's ranks takes of its host. Raises `UserError` if the model cannot be planned."""
    check_partition(config)
    vocab_size = None if known_vocabulary(config) else _MANY_WORDS
    try:
        plan = make_plan(config, vocab_size, num_ranks)
    except UserError as error:
        raise UserError(f"{error}; give --memory-gib, the memory of each worker") from None
    if for_gpu(config):
        return _LIBRARIES_CUDA + _copies(plan.stages)
    return _LIBRARIES_CPU + _copies(plan.stages) + sum(sum(plan.memory(stage)) for stage in plan.stages)


def memory_on_host(estimates: Sequence[MemoryEstimate]) -> int:
    """Bytes that a rank whose stages compute on the CPU takes besides its libraries."""
    return _copies(estimates) + sum(estimate.total for estimate in estimates)


def _copies(stages: Sequence[StageCost] | Sequence[MemoryEstimate]) -> int:
    """A checkpoint is written from a copy of the weights and the optimizer's state."""
    return sum(stage.weights + stage.optimizer for stage in stages)
