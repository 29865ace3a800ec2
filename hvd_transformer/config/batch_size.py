"""Samples per step and per evaluation, and the number of replicas that the learning rate is scaled by."""

from hvd_transformer.config.schema import Config, TrainingConfig
from hvd_transformer.errors import UserError


def step_samples(training: TrainingConfig, dp: int) -> int:
    """Samples per full step, over all `dp` replicas and their accumulation steps."""
    return training.global_batch_size or training.batch_samples * training.accumulation * dp


def eval_samples(training: TrainingConfig) -> int | None:
    """How many samples of a split are evaluated at most, the first ones in the order of the data; None: all."""
    if training.eval_batches is None:
        return None
    return training.eval_batches * (training.eval_batch_size or training.batch_samples)


def rate_replicas(training: TrainingConfig, dp: int, local_steps: int = 1, batch_size: int | None = None) -> float:
    """The number of replicas that `optimizer.lr` is scaled by.

    With `global_batch_size` it is the number that would process a step in one accumulation step each, so that the
    learning rate does not depend on the real number `dp` of replicas. Without accumulation both are the same. With
    local steps each replica updates by its own samples, 1 / dp of a step's.

    `batch_size`: the one that the run began with. Another one of a resumed run cuts the same step into other
    accumulation steps, which must not change its rate.
    """
    batch_size = batch_size or training.batch_samples
    replicas = dp if training.global_batch_size is None else training.global_batch_size / batch_size
    return replicas if local_steps == 1 else replicas / dp


def check_step_size(config: Config, dp: int) -> None:
    """Raise `UserError` if some replica would never have any work."""
    training = config.training
    if training.global_batch_size is None:
        return
    most, of = training.global_batch_size, ""
    if config.data.batching == "columns":  # a stretch's columns cannot be split
        most //= training.batch_samples
        of = f" of training.batch_size={training.batch_size} columns each"
    elif _whole_batches(config) and training.batch_size != "auto":  # which divides each replica's part
        most = -(-most // training.batch_size)
        of = f" of training.batch_size={training.batch_size} samples each"
    if dp > most:
        raise UserError(
            f"training.global_batch_size={training.global_batch_size}: is enough for {most} ranks{of}, not for {dp}"
        )


def possible_batch_sizes(config: Config, dp: int) -> list[int]:
    """What `training.batch_size=auto` may become on `dp` replicas, ascending.

    Each divides a replica's part of a step into accumulation steps as even as possible: of several sizes with as many
    accumulation steps it is the smallest. Where an item of the sampler is a batch (all but texts in windows) it divides
    the whole step, which then has exactly `global_batch_size` samples.
    """
    total, least = config.training.global_batch_size, config.parallel.micro_batches
    assert total is not None
    part = -(-total // dp)
    exact = _whole_batches(config) or ":" in config.task
    found = [size for size in _even_sizes(part) if size >= least and (total % size == 0 or not exact)]
    if not found:
        raise UserError(
            f"parallel.micro_batches={least}: more than the {part} samples that each of {dp} replicas has of "
            f"training.global_batch_size={total}"
        )
    return found


def _whole_batches(config: Config) -> bool:
    """Whether the replicas share the batches of a step, which are of samples of similar length, and not its samples."""
    return config.task in ("translation", "classification") or config.data.messages_column is not None


def cuts_windows(config: Config) -> bool:
    """Whether the replicas share the samples of a step: windows of a text."""
    return config.task == "language_model" and not _whole_batches(config) and config.data.batching == "windows"


def _even_sizes(part: int) -> list[int]:
    """ceil(part / steps) for each number of steps, ascending; there are about 2 √part."""
    sizes = [part]
    while sizes[-1] > 1:
        steps = -(-part // (sizes[-1] - 1))  # the fewest with which it is smaller
        sizes.append(-(-part // steps))
    return sizes[::-1]


def with_batch_size(config: Config, size: int) -> Config:
    """The configuration with this number for `training.batch_size`."""
    return config.model_copy(update={"training": config.training.model_copy(update={"batch_size": size})})
