"""Checks of settings for fine-tuning: Hugging Face folders, LoRA, instruction tuning."""

from pathlib import Path

from hvd_transformer.config.families import read_folder
from hvd_transformer.config.schema import Config, shown
from hvd_transformer.errors import UserError


def check_fine_tuning(config: Config) -> None:
    """Raise `UserError`, which names the keys that do not fit together."""
    _check_lora(config)
    if config.model.pretrained is not None:
        _check_pretrained(config)
    if config.data.messages_column is not None and config.task == "language_model":
        _check_messages(config)


_LORA = ("lora_rank", "lora_alpha", "lora_targets")


def _check_lora(config: Config) -> None:
    model = config.model
    if model.lora_rank is None:
        for key in _LORA[1:]:
            if (value := getattr(model, key)) is not None:
                raise UserError(f"model.{key}={value}: only with model.lora_rank; leave it at none")
    elif model.pretrained is None or config.task != "language_model":
        raise UserError(f"model.lora_rank={model.lora_rank}: only with task=language_model and model.pretrained")


def _check_pretrained(config: Config) -> None:
    origin, folder = f"model.pretrained={config.model.pretrained}", Path(str(config.model.pretrained))
    if config.task not in (built_in := ("language_model", "translation", "classification")):
        raise UserError(f"{origin}: with task={', '.join(built_in[:-1])} or {built_in[-1]}, not task={config.task}")
    own = [("data", key) for key in ("tokenizer", "vocab_size", "min_frequency", "tokenizer_sample_mb")]
    alone: list[tuple[str, str]] = []
    if not config.model.in_own_blocks:
        own += [("model", key) for key in type(config.model).model_fields if key not in ("pretrained", *_LORA)]
        alone += [("parallel", key) for key in ("pipeline", "tensor", "partition")]
        alone += [("training", "compile")]
        if config.model.lora_rank is not None:
            origin += f" and model.lora_rank={config.model.lora_rank}"
        if config.parallel.recompute == "except_last":
            raise UserError(f"parallel.recompute=except_last: not with {origin}; use always or never")
    for section, key in own + alone:
        values = getattr(config, section)
        value, default = getattr(values, key), type(values).model_fields[key].default
        if value != default:
            may_be_own = config.task == "language_model" and config.model.lora_rank is None
            if (section, key) in alone and may_be_own and read_folder(folder) is None:
                raise UserError(f"{section}.{key}={value}: needs {folder / 'config.json'}, which cannot be read here")
            why = "which has its own" if (section, key) in own else "which only supports data parallelism"
            raise UserError(f"{section}.{key}={shown(value)}: not with {origin}, {why}; leave it at {shown(default)}")


def _check_messages(config: Config) -> None:
    data, given = config.data, f"data.messages_column={config.data.messages_column}"
    for key in ("batching", "text_column", "sources", "document_mask"):
        value, default = getattr(data, key), type(data).model_fields[key].default
        if value != default:
            raise UserError(f"data.{key}={shown(value)}: not with {given}; leave it at {shown(default)}")
