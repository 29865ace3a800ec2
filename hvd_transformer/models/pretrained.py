"""Models of Hugging Face folders: classifiers on encoders, causal language models, translators. Parameters keep their
names, so that the weights of a checkpoint can be used as those of a folder."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_transformer.config.families import read_folder
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import from_folder, origin
from hvd_transformer.models.documents import document_mask, document_places, document_starts
from hvd_transformer.nn.dropout import torch_dropout_key

OURS = "hvd_transformer"  # our key in config.json of an exported folder
GENERATION = "generation_config.json"


def eos_token_ids(generation: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text by a generation_config.json."""
    found = generation.get("eos_token_id")
    return [] if found is None else found if isinstance(found, list) else [found]


def has_other_names(family: str) -> bool:
    """Whether transformers' modules of this family have other weights than its folders: since version 5 the experts of
    a mixture are joined. `save_pretrained` takes them apart."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return False
    return bool(get_checkpoint_conversion_mapping(family))


def load_classifier(folder: Path, labels: Sequence[str], pad: int) -> tuple[nn.Module, list[str]]:
    """Load a classifier for these labels, in the default dtype; also returns the names of new weights, which are the
    last layers if the folder has none or others. `pad` is the token that fills a batch.

    Raises `UserError` if the folder holds no such model.
    """
    names = dict(enumerate(labels))
    check_classifies(folder)
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
    # A folder that was trained without a pooler does not have its weights.
    if lacking := [name for name in new if name.startswith(inside) and ".pooler." not in name]:
        raise UserError(f"{origin(folder)}: lacks {lacking[0]}, a weight of {type(model).__name__}")
    return model, new


def load_language_model(folder: Path) -> nn.Module:
    """Load a causal language model, in the default dtype. Raises `UserError` if the folder holds none."""
    model: nn.Module
    check_continues_texts(folder)
    model, new = _load("AutoModelForCausalLM", folder)
    if new:
        raise UserError(f"{origin(folder)}: no causal language model: {type(model).__name__} lacks {new[0]}")
    if not _is_causal(model):
        raise UserError(
            f"{origin(folder)}: no causal language model: {type(model).__name__} also attends to later tokens"
        )
    return model


def check_classifies(folder: Path) -> None:
    """Raise `UserError` if transformers has no classifier of the folder's family."""
    _check_family(folder, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "classifier")


def check_continues_texts(folder: Path) -> None:
    """Raise `UserError` if transformers has no causal language model of the folder's family."""
    _check_family(folder, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal language model")


# Families of encoder-decoders that translate.
_TRANSLATORS = {"marian": "Marian", "m2m_100": "M2M100 or NLLB"}


def check_translates(folder: Path) -> None:
    """Raise `UserError` if the folder does not hold a model that translates."""
    family = from_folder("AutoConfig", folder).model_type
    if family not in _TRANSLATORS:
        known = ", ".join(_TRANSLATORS.values())
        raise UserError(f"{origin(folder)}: a {family}, not a model that translates: must be {known}")


def load_translator(folder: Path) -> nn.Module:
    """Load a model that translates, in the default dtype. Raises `UserError` if the folder holds none."""
    model: nn.Module
    model, new = _load("AutoModelForSeq2SeqLM", folder)
    if new:
        raise UserError(f"{origin(folder)}: lacks {new[0]}, a weight of {type(model).__name__}")
    return model


@torch.no_grad()
def _is_causal(model: nn.Module) -> bool:
    """Whether changing the last token leaves all logits before it unchanged."""
    before, after = (model(input_ids=torch.tensor([[0, 1, 2, last]])).logits[:, :-1] for last in (0, 1))
    return bool((before - after).abs().max() <= 1e-5 * before.abs().max())


def text_logits(model: nn.Module, tokens: Tensor, document_end: int | None) -> Tensor:
    """The logits [B, T, V] of a causal language model for tokens [B, T]; with a `document_end`, the token that ends a
    document, each document by itself."""
    inputs: dict[str, Any] = {}
    if document_end is not None:
        starts = document_starts(tokens, document_end)
        mask = document_mask(starts, next(model.parameters()).dtype)
        inputs = {"position_ids": document_places(starts), "attention_mask": mask}
    logits: Tensor = model(input_ids=tokens, use_cache=False, **inputs).logits
    return logits


@torch.no_grad()
def check_documents(model: nn.Module, folder: Path, length: int) -> None:
    """Raise `UserError` if `text_logits` cannot keep documents of texts of this length apart: not every family has
    positions to start anew, and a mask replaces the window of those that do not attend far back."""
    trains = model.training
    model.eval()
    try:
        one, other = (text_logits(model, torch.tensor([[*first, 0, 3, 4]]), 0)[:, 3:] for first in ((1, 2), (2, 1)))
        alone = text_logits(model, torch.tensor([[3, 4]]), None)
        windows = (getattr(model.config, key, None) for key in ("sliding_window", "attention_chunk_size"))
        is_apart = all(window is None or window >= length for window in windows)
        is_apart &= torch.equal(one, other) and torch.allclose(one, alone, rtol=1e-2, atol=1e-3)
    except (TypeError, ValueError, RuntimeError, IndexError):
        is_apart = False
    model.train(trains)
    if not is_apart:
        raise UserError(
            f"data.document_mask=true: not with {origin(folder)}; {type(model).__name__} cannot keep documents apart"
        )


# Families that many folders are of, to be named: transformers has hundreds.
_WELL_KNOWN = (
    *("llama", "qwen3", "gpt2", "gpt_neox", "mistral", "phi3", "gemma2", "opt"),
    *("bert", "roberta", "xlm-roberta", "distilbert", "deberta-v2", "electra", "modernbert"),
)


def _check_family(folder: Path, mapping: str, kind: str) -> None:
    """Raise `UserError`, which names some that are supported, if transformers' `mapping` lacks the folder's family."""
    family = (read_folder(folder) or {}).get("model_type")
    if not isinstance(family, str) or find_spec("transformers") is None:  # told when it is read
        return
    from transformers.models.auto import modeling_auto

    families = getattr(modeling_auto, mapping)
    if family not in families:
        known = [name for name in _WELL_KNOWN if name in families]
        raise UserError(
            f"{origin(folder)}: model_type={family} in its config.json: transformers has no {kind} of this family; "
            f"supported are {', '.join(known)} and {len(families) - len(known)} others"
        )


def _load(kind: str, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    dtype = torch.get_default_dtype()
    options |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    model, info = from_folder(kind, folder, **options)
    model.config.architectures = [type(model).__name__]
    _train_whole(model)
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := sorted(model.state_dict().keys() - kept):
        raise UserError(f"{origin(folder)}: {type(model).__name__} has {buffers[0]}, which is not a trainable weight")
    new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    return model, sorted(new)


def _train_whole(model: nn.Module) -> None:
    """Marian's table of positions is no weight, since its class makes it anew; the bias of its output layer, which its
    class keeps fixed, is one and is trained, as by the program Marian."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.requires_grad:
                delattr(module, name)
                module.register_buffer(name, weight.data, persistent=False)
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        del model.final_logits_bias
        model.final_logits_bias = nn.Parameter(bias)


def recompute(model: nn.Module, folder: Path) -> None:
    """Let the model recompute its blocks in backward (activation checkpointing). Raises `UserError` if it cannot."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"parallel.recompute=always: {origin(folder)}: its model cannot recompute; leave it at never")
    name = "activation_checkpointing_enable"  # its name in newer versions
    enable: Any = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def check_fits(model: nn.Module, folder: Path, vocab_size: int, length: int) -> None:
    """Raise `UserError` if the tokenizer has more tokens than the model, or samples of this length exceed its
    positions."""
    rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocab_size > rows:
        raise UserError(f"{origin(folder)}: its tokenizer has {vocab_size} tokens, but its model only {rows}")
    positions = num_positions(model)
    if positions is not None and length > positions:
        raise UserError(f"data.sequence_length={length}: longer than {origin(folder)} can take, {positions} tokens")


def num_positions(model: nn.Module) -> int | None:
    """The maximum number of tokens of a sample, if the model states one."""
    for name, module in model.named_modules():
        # RoBERTa and similar models count positions from the one after padding.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    found = getattr(model.config, "max_position_embeddings", None)
    return int(found) if isinstance(found, int) and found > 0 else None  # XLNet, which has no limit, states -1


def label_names(folder: Path) -> list[str] | None:
    """The class names of the folder's own head, in the order of their numbers; None if there are none."""
    names = from_folder("AutoConfig", folder).id2label or {}
    labels = [str(names[number]) for number in sorted(names)]
    return None if labels == [f"LABEL_{number}" for number in range(len(labels))] else labels


def config_files(model: nn.Module) -> dict[str, str]:
    """The configuration files of the model's folder, as texts by file name."""
    config: Any = model.config
    said = config.to_dict()
    said.pop(OURS, None)  # from an exported folder
    files = {"config.json": json.dumps(said, indent=2, sort_keys=True, ensure_ascii=False) + "\n"}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        files[GENERATION] = generation.to_json_string()
    return files


class ClassLogits(nn.Module):
    """The logits [B, C] of a classifier for tokens [B, T]; `allowed` [B, T] marks the tokens that are not padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, allowed: Tensor) -> Tensor:
        with torch_dropout_key(tokens.device):
            logits: Tensor = self.model(input_ids=tokens, attention_mask=allowed.long()).logits
        return logits
