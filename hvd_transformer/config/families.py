"""Families of Hugging Face folders that are trained in this package's own blocks: their config.json as keys of `model`.

Pipelines, tensor parallelism, recomputation, sharded optimizers and compiled training work for these; models of other
families are transformers' own modules, and train with data parallelism alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hvd_transformer.config.schema import Config, shown
from hvd_transformer.errors import UserError

FAMILIES = ("llama", "qwen3")
# Keys of `model` that may differ from the folder's.
_FREE = ("pretrained", "dropout", "loss_chunk")


def read_folder(folder: Path) -> dict[str, Any] | None:
    """The folder's config.json; None if there is none, which is told when the model is loaded."""
    try:
        found = json.loads((folder.expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    return found if isinstance(found, dict) else None


def with_own_blocks(config: Config) -> Config:
    """The configuration with the folder's `model`, if `model.pretrained` is of one of the families. With LoRA it stays
    transformers' own module, since peft's adapters are for that.

    Raises `UserError` if it is a variant that the blocks cannot be, or if a key of `model` contradicts it.
    """
    if config.model.pretrained is None:
        return config
    folder = Path(config.model.pretrained)
    if config.task != "language_model" or config.model.lora_rank is not None:
        lora = "" if config.model.lora_rank is None else f" and model.lora_rank={config.model.lora_rank}"
        return _in_theirs(config, f"task={config.task}, model.pretrained={folder}{lora}")
    found = read_folder(folder)
    if found is None:  # also where a run is resumed whose folder is gone
        return config
    if found.get("model_type") not in FAMILIES:
        return _in_theirs(config, f"model.pretrained={folder}, whose model_type is {found.get('model_type')}")
    keys = model_keys(found, f"model.pretrained={folder}")
    for key, entry in type(config.model).model_fields.items():
        value, wanted = getattr(config.model, key), keys.get(key, entry.default)
        if key not in _FREE and value not in (entry.default, wanted):
            raise UserError(
                f"model.{key}={shown(value)}: not with model.pretrained={folder}, which has {shown(wanted)}; "
                f"leave it at {shown(entry.default)}"
            )
    values = config.model.model_dump() | keys
    try:
        model = type(config.model).model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"model.pretrained={folder}: {place} in its config.json: {first['msg']}") from None
    return config.model_copy(update={"model": model})


def _in_theirs(config: Config, origin: str) -> Config:
    """The configuration as it is, of transformers' own module. Raises `UserError` if it has our rotary positions."""
    if config.model.position == "rotary":  # else it would be taken for one of our blocks
        raise UserError(f"model.position=rotary: not with {origin}; leave it at sinusoidal")
    return config


def model_keys(found: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The keys of `model` for a config.json of one of the families, whose own defaults fill what it leaves out.

    Raises `UserError`, which begins with `origin`.
    """
    family = found["model_type"]
    is_qwen = family == "qwen3"
    try:
        heads, width = int(found["num_attention_heads"]), int(found["hidden_size"])
        kv_heads = int(found.get("num_key_value_heads", 32 if is_qwen else heads) or heads)
        head_width = int(found.get("head_dim", 128 if is_qwen else width // heads) or width // heads)
        keys = {
            "vocab_size": int(found["vocab_size"]),
            "num_layers": int(found["num_hidden_layers"]),
            "d_model": width,
            "num_heads": heads,
            "num_kv_heads": None if kv_heads == heads else kv_heads,
            "head_width": None if head_width * heads == width else head_width,
            "d_feedforward": int(found["intermediate_size"]),
            "max_length": int(found.get("max_position_embeddings", 32768 if is_qwen else 2048)),
            "norm_eps": float(found.get("rms_norm_eps", 1e-6)),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: its config.json is not a {family}'s: {type(error).__name__}: {error}") from None
    bias = bool(found.get("attention_bias", False))
    _refuse(origin, found, "hidden_act", found.get("hidden_act", "silu") != "silu", "silu")
    if is_qwen:
        _refuse(origin, found, "attention_bias", bias, "false")
        _refuse(origin, found, "use_sliding_window", bool(found.get("use_sliding_window", False)), "false")
    else:
        _refuse(origin, found, "mlp_bias", bool(found.get("mlp_bias", False)) != bias, "attention_bias")
    try:
        theta, scaling = _rope(found)
    except (TypeError, ValueError) as error:
        raise UserError(f"{origin}: its config.json is not a {family}'s: {type(error).__name__}: {error}") from None
    return keys | {
        "norm": "pre",
        "norm_type": "rms",
        "qk_norm": is_qwen,
        "activation": "swiglu",
        "bias": bias,
        "head_bias": False,
        "scale_embedding": False,
        "position": "rotary",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": bool(found.get("tie_word_embeddings", False)),
    }


def _refuse(origin: str, found: Mapping[str, Any], key: str, is_other: bool, wanted: str) -> None:
    if is_other:
        raise UserError(f"{origin}: {key}={found.get(key)} in its config.json: only {wanted} is supported")


def _rope(found: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """`rope_theta` and `rope_scaling`; transformers 5 writes both into `rope_parameters` and prefers `rope_scaling`."""
    given = dict(found.get("rope_scaling") or found.get("rope_parameters") or {})
    theta = float(given.pop("rope_theta", None) or found.get("rope_theta") or 10000.0)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind == "default":
        return theta, None
    if kind == "yarn" and "original_max_position_embeddings" not in given:
        given["original_max_position_embeddings"] = found.get("max_position_embeddings")
    return theta, {"rope_type": kind, **{key: value for key, value in given.items() if value is not None}}
