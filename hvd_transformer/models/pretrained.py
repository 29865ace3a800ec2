"""Models of Hugging Face folders: encoders that classify, and causal language models. Their parameters keep their
names, so that a checkpoint's weights are a folder's again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import from_folder, origin
from hvd_transformer.nn.dropout import torch_dropout_key

OURS = "hvd_transformer"  # the key in an exported folder's config.json that is ours


def load_classifier(folder: Path, labels: Sequence[str], pad: int) -> tuple[nn.Module, list[str]]:
    """In the default type, for these classes, and the names of the weights that are new: its last layers, where the
    folder has none or others. `pad` fills a batch. Raises `UserError`."""
    names = dict(enumerate(labels))
    model, new = _load(
        "AutoModelForSequenceClassification",
        folder,
        num_labels=len(labels),
        id2label=names,
        label2id={label: number for number, label in names.items()},
        pad_token_id=pad,
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
    if not _is_causal(model):
        raise UserError(f"{origin(folder)}: no causal language model: {type(model).__name__} sees the tokens to come")
    return model


@torch.no_grad()
def _is_causal(model: nn.Module) -> bool:
    """Whether another last token changes nothing before it."""
    before, after = (model(input_ids=torch.tensor([[0, 1, 2, last]])).logits[:, :-1] for last in (0, 1))
    return bool((before - after).abs().max() <= 1e-5 * before.abs().max())


def _load(kind: str, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    dtype = torch.get_default_dtype()
    options |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    model, info = from_folder(kind, folder, **options)
    model.config.architectures = [type(model).__name__]
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := sorted(model.state_dict().keys() - kept):
        raise UserError(f"{origin(folder)}: {type(model).__name__} has {buffers[0]}, which is no weight to be trained")
    new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    return model, sorted(new)


def check_fits(model: nn.Module, folder: Path, vocab_size: int, length: int) -> None:
    """Raises `UserError` where the tokenizer has more tokens than the model, or samples of this length more than its
    positions."""
    rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocab_size > rows:
        raise UserError(f"{origin(folder)}: its tokenizer has {vocab_size} tokens, its model {rows}")
    positions = num_positions(model)
    if positions is not None and length > positions:
        raise UserError(f"data.sequence_length={length}: longer than {origin(folder)} can take, {positions} tokens")


def num_positions(model: nn.Module) -> int | None:
    """Tokens of the longest sample, where the model says so."""
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding's.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    found = getattr(model.config, "max_position_embeddings", None)
    return int(found) if isinstance(found, int) else None


def label_names(folder: Path) -> list[str] | None:
    """The classes of the folder's own head, in the order of their numbers; None: it has none, or they have no names."""
    names = from_folder("AutoConfig", folder).id2label or {}
    labels = [str(names[number]) for number in sorted(names)]
    return None if labels == [f"LABEL_{number}" for number in range(len(labels))] else labels


def config_files(model: nn.Module) -> dict[str, str]:
    """The texts of a folder that say what its weights are, by name."""
    config: Any = model.config
    said = config.to_dict()
    said.pop(OURS, None)  # of the folder that it was
    files = {"config.json": json.dumps(said, indent=2, sort_keys=True, ensure_ascii=False) + "\n"}
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
        with torch_dropout_key(tokens.device):
            logits: Tensor = self.model(input_ids=tokens, attention_mask=allowed.long()).logits
        return logits


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """A language model's logits [B, T, V] of token numbers [B, T]."""
    with torch_dropout_key(tokens.device):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
