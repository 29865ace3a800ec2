"""The learning rate as a pure function of the step, so that there is no state to restore."""

import math

from hvd_transformer.config.schema import OptimizerConfig

_MANY_REPLICAS = 8


def peak_rate(config: OptimizerConfig, replicas: float) -> float:
    """`optimizer.lr` scaled by the number of replicas (Goyal et al. 2017, arXiv 1706.02677, section 2.1).

    `config.batch_size.rate_replicas` gives that number.
    """
    scale = {"linear": replicas, "sqrt": math.sqrt(replicas), "none": 1.0}[config.lr_scaling]
    return config.lr * scale


def scaling_warning(config: OptimizerConfig, replicas: float) -> str | None:
    """Warning if Adam starts at a rate scaled linearly by many replicas, which often diverges."""
    if config.name == "sgd" or config.lr_scaling != "linear" or config.warmup_steps or replicas < _MANY_REPLICAS:
        return None
    return (
        f"{config.name} starts with a learning rate of {peak_rate(config, replicas):g}, which is optimizer.lr x "
        f"{replicas:g} replicas, and may diverge: set optimizer.lr_scaling=sqrt, optimizer.warmup_steps, or both"
    )


def learning_rate(config: OptimizerConfig, replicas: float, step: int, epoch: int, total_steps: int) -> float:
    """The learning rate of update `step` in `epoch`, both from 0, of a job of `total_steps`."""
    peak, warmup = peak_rate(config, replicas), config.warmup_steps
    if config.schedule == "step":
        peak *= config.gamma ** (epoch // config.step_epochs)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule in ("constant", "step"):
        return peak
    if config.schedule == "noam":  # Vaswani et al. 2017, section 5.3, scaled so that its highest value is the peak
        return peak * math.sqrt(warmup / (step + 1))
    if config.schedule == "wsd":  # Hägele et al. 2024, arXiv 2405.18392, section 3: better than a linear decay
        decay = max(1, round(config.decay_fraction * total_steps))
        return peak * (1 - math.sqrt(_done(step, max(warmup, total_steps - decay), total_steps)))
    done = _done(step, warmup, total_steps)
    if config.schedule == "linear":
        return peak * (1 - done)
    return peak * (config.gamma + (1 - config.gamma) * 0.5 * (1 + math.cos(math.pi * done)))


def _done(step: int, start: int, stop: int) -> float:
    """How much of the way from step `start` to `stop` is behind, from 0 to 1."""
    return min(1.0, max(0, step - start) / max(1, stop - start))
