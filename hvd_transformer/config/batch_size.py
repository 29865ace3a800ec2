"""Samples per step, and the replicas that the learning rate scales with."""

from hvd_transformer.config.schema import Config, TrainingConfig
from hvd_transformer.errors import UserError


def step_samples(training: TrainingConfig, dp: int) -> int:
    """The samples of a full step, over all replicas and their rounds."""
    return training.global_batch_size or training.batch_size * training.accumulation * dp


def rate_replicas(training: TrainingConfig, dp: int) -> float:
    """The number of replicas that `optimizer.lr` is scaled to.

    With `global_batch_size` it is those that would see such a step in one round each, so that the rate does not depend
    on how many there are. Without accumulation both are the same.
    """
    return dp if training.global_batch_size is None else training.global_batch_size / training.batch_size


def check_step_size(config: Config, dp: int) -> None:
    """Raises `UserError` where some replica would never have anything to do."""
    training = config.training
    if training.global_batch_size is None:
        return
    columns = config.data.batching == "columns"  # where all of a stretch go together
    most = training.global_batch_size // training.batch_size if columns else training.global_batch_size
    if dp > most:
        of = f" of training.batch_size={training.batch_size} columns each" if columns else ""
        raise UserError(
            f"training.global_batch_size={training.global_batch_size}: gives work to {most} ranks{of}, not to {dp}"
        )
