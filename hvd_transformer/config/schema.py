"""The typed schema: each setting once, with its type, range, default and description.

The keys of each section are in a file of `config.sections`. The schema is the source of `hvd-train --help`, the checks,
`config.yaml`, and the rules for what may change when a run resumes.
"""

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

from hvd_transformer.config.sections.checkpoint import CheckpointConfig
from hvd_transformer.config.sections.communication import CommunicationConfig
from hvd_transformer.config.sections.data import LEARNED_TOKENIZERS, DataConfig
from hvd_transformer.config.sections.key import OptionalName, Section, changeable, fixed
from hvd_transformer.config.sections.model import ModelConfig
from hvd_transformer.config.sections.optimizer import OptimizerConfig
from hvd_transformer.config.sections.parallel import ParallelConfig
from hvd_transformer.config.sections.training import TrainingConfig
from hvd_transformer.config.sections.translation import TranslationConfig
from hvd_transformer.errors import UserError

__all__ = [
    "KEYS",
    "LEARNED_TOKENIZERS",
    "SECTIONS",
    "CheckpointConfig",
    "CommunicationConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
    "TranslationConfig",
    "allowed",
    "built_in",
    "field",
    "flatten",
    "may_change",
]


class Config(Section):
    """The configuration of a job."""

    task: str = fixed(
        "language_model",
        "task to train: language_model, translation, classification, or your own package.module:Class",
        allowed="'language_model', 'translation', 'classification' or package.module:Class",
        pattern=r"^(language_model|translation|classification|[\w.]+:\w+)$",
    )
    output_dir: str = changeable("runs/default", "run directory", min_length=1)
    profile: bool = changeable(
        False, "write timeline-NNN.json, a Chrome trace per rank, of steps 3 to 7 after this start"
    )
    tracking: list[Literal["wandb", "mlflow", "trackio"]] = changeable(
        [],
        "experiment trackers that get the configuration, the metrics and the summary: a list of wandb, mlflow and "
        "trackio; their keys come from the environment or their own login",
        allowed="a list of wandb, mlflow and trackio, such as [wandb, mlflow]",
    )
    tracking_project: OptionalName = changeable(
        None,
        "project (MLflow: experiment) in the trackers; none: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or TRACKIO_PROJECT, "
        "otherwise hvd-transformer",
    )
    seed: int = fixed(1, "random seed of the weights, the data order and dropout", ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    translation: TranslationConfig = TranslationConfig()
    communication: CommunicationConfig = CommunicationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def flatten(config: Config) -> dict[str, Any]:
    """The configuration as dotted keys, in the schema's order: {"task": …, "model.num_layers": …}."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


KEYS: tuple[str, ...] = tuple(flatten(Config()))
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(key.split(".")[0] for key in KEYS if "." in key))


def field(key: str) -> FieldInfo:
    """The schema's entry for a dotted key."""
    section, _, name = key.rpartition(".")
    model = Config.model_fields[section].annotation if section else Config
    assert isinstance(model, type) and issubclass(model, Section)
    return model.model_fields[name]


def may_change(key: str) -> bool:
    """Tell whether a run may resume from a checkpoint that has another value for this dotted key."""
    return bool(_extra(key)["may_change"])


def check_new_run(resume: object, run: Path) -> None:
    """Raise `UserError` if `checkpoint.resume` wants a new run, and the folder `run` has the checkpoints of another."""
    if resume == "never" and any(run.glob("checkpoints/step-*")):
        raise UserError(
            f"checkpoint.resume=never: {run} has checkpoints, which a new run would overwrite; choose another "
            "output_dir, or checkpoint.resume=auto to resume"
        )


def may_be_none(key: str) -> bool:
    """Tell whether this dotted key may have no value."""
    return type(None) in get_args(field(key).annotation)


def allowed(key: str) -> str | None:
    """What the value of this dotted key may be, in words; None if its type and limits say it."""
    found: str | None = _extra(key)["allowed"]
    return found


def shown(value: Any) -> str:
    """A value as the user would type it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(name)}: {shown(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if text.isprintable() else repr(text)


def built_in(pattern: str) -> list[str]:
    """The words among the alternatives of a key's pattern, such as the built-in tasks."""
    return [word for word in pattern.removeprefix("^(").removesuffix(")$").split("|") if word.isidentifier()]


def _extra(key: str) -> dict[str, Any]:
    extra = field(key).json_schema_extra
    assert isinstance(extra, dict)
    return extra
