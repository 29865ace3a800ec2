"""Estimates the memory of the host that a rank takes: schedulers give a job what it asks for and no more."""

from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.planning.memory_plan import known_vocabulary, make_plan
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
    # A checkpoint is written from a copy of the weights and the optimizer's state.
    copies = sum(stage.weights + stage.optimizer for stage in plan.stages)
    if config.training.device == "cuda":
        return _LIBRARIES_CUDA + copies
    return _LIBRARIES_CPU + copies + sum(sum(plan.memory(stage)) for stage in plan.stages)
