"""Models of Hugging Face folders: encoders that classify, and causal language models. Their parameters keep their
names, so that a checkpoint's weights are a folder's again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_transformer.errors import UserError
from hvd_transformer.models.dropout import torch_dropout_place
from hvd_transformer.pretrained import from_folder, origin


def load_classifier(folder: Path, labels: Sequence[str]) -> tuple[nn.Module, list[str]]:
    """In the default type, for these classes, and the names of the weights that are new: its last layers, where the
    folder has none or others. Raises `UserError`."""
    names = dict(enumerate(labels))
    model, new = _load(
        "AutoModelForSequenceClassification",
        folder,
        num_labels=len(labels),
        id2label=names,
        label2id={label: number for number, label in names.items()},
        ignore_mismatched_sizes=True,
    )
    inside = f"{model.base_model_prefix}."
    # A pooler is none of what a folder that was trained without one has.
    if lacking := [name for name in new if name.startswith(inside) and ".pooler." not in name]:
        raise UserError(f"{origin(folder)}: lacks {lacking[0]}, a weight of {type(model).__name__}")
    return model, new


def load_language_model(folder: Path) -> nn.Module:
    """In the default type. Raises `UserError`."""
    model: nn.Module
    model, new = _load("AutoModelForCausalLM", folder)
    if new:
        raise UserError(f"{origin(folder)}: no causal language model: {type(model).__name__} lacks {new[0]}")
    return model


def _load(kind: str, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    model, info = from_folder(kind, folder, dtype=torch.get_default_dtype(), output_loading_info=True, **options)
    model.config.architectures = [type(model).__name__]
    new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    return model, sorted(new)


def num_positions(model: nn.Module) -> int | None:
    """Tokens of the longest sample, where the configuration says so."""
    found = getattr(model.config, "max_position_embeddings", None)
    return int(found) if isinstance(found, int) else None


def config_files(model: nn.Module) -> dict[str, str]:
    """The texts of a folder that say what its weights are, by name."""
    config: Any = model.config
    files = {"config.json": config.to_json_string()}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string()
    return files


class ClassLogits(nn.Module):
    """A classifier's logits [B, C] of token numbers [B, T], of which `allowed` [B, T] are no padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, allowed: Tensor) -> Tensor:
        with torch_dropout_place(tokens.device):
            logits: Tensor = self.model(input_ids=tokens, attention_mask=allowed.long()).logits
        return logits


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """A language model's logits [B, T, V] of token numbers [B, T]."""
    with torch_dropout_place(tokens.device):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
