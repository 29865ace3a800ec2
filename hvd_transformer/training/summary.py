"""What summary.json holds of a run."""

from collections.abc import Mapping
from typing import Any

from hvd_transformer.config.best_metric import metric_sign
from hvd_transformer.training.trainer import Trainer


def run_summary(
    status: str, trainer: Trainer, environment: Mapping[str, Any], valid: Mapping[str, float]
) -> dict[str, Any]:
    """The run as it is now, with the metrics of its newest evaluation, if there was one."""
    state, most, best_metric = trainer.state, trainer.task.eval_samples, trainer.config.training.best_metric
    return {
        "status": status,
        "steps": state.step,
        "epochs": state.epoch,
        "samples": state.samples,
        "seconds": round(state.seconds, 3),
        "unit": trainer.task.unit,
        "tokens_per_second": round(state.targets / state.seconds, 1) if state.seconds else None,
        "world": trainer.world.size,
        "dp": trainer.mesh.dp,
        "tp": trainer.mesh.tp,
        "pp": len(trainer.engine.stages),
        "backend": trainer.world.backend,
        "device": trainer.mesh.device.type,
        "compression": trainer.engine.grad_sync.wire.format,
        "parameters": trainer.engine.num_parameters,
        "env": environment,
        **({} if most is None else {"eval_samples": most}),
        "train_loss": state.train_loss,
        "valid_loss": None,
        **of_split("valid", valid),
        "best_step": state.best_step,
        "best_metric": best_metric,
        "best_value": None if state.best is None else metric_sign(best_metric) * state.best,
    }


def of_split(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a split under the names of files and screens, such as valid_loss."""
    return {f"{split}_{name}": value for name, value in metrics.items()}


def finite(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinities and NaN, which JSON lacks, by null."""
    return {
        key: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for key, value in summary.items()
    }
