"""Load a trained model from a checkpoint, a run directory (its best checkpoint) or an exported folder.

An exported folder holds model.safetensors, the tokenizers, and config.json: {"format": 1, "task": …, "model": {…}, …}.
The export of a `model.pretrained` is a Hugging Face folder again; its config.json holds the same under
"hvd_transformer". With LoRA it is a folder of peft, which names the folder of the model that the adapters belong to.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from hvd_transformer import __version__
from hvd_transformer.checkpoint import manifest
from hvd_transformer.checkpoint.saved_run import CONFIG, is_run
from hvd_transformer.checkpoint.store import FOR_TRAINING, MODEL, STATE, read_state, resolve
from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.config.schema import ModelConfig, TranslationConfig
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.prepared import tokenizer_prefix
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.models import lora, pretrained
from hvd_transformer.models.classifier import Classifier
from hvd_transformer.models.encoder_decoder import EncoderDecoder
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.nn.matmul import limit_onednn_caches
from hvd_transformer.parallel.precision import weight_dtype
from hvd_transformer.parallel.replica_check import checksum

FORMAT = 1  # of exported folders
_SECTIONS = (("model", ModelConfig), ("translation", TranslationConfig))


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode and what is needed to use it.

    `tokenizers` by role: "text", or "source" and "target". `longest`: tokens of the longest training sample.
    `target_length`: `data.target_length`. `ends`: tokens that end a text, beside the tokenizer's, by the
    generation_config.json of the folder that the weights began with.
    """

    config: ModelConfig
    translation: TranslationConfig
    tokenizers: dict[str, Tokenizer]
    labels: list[str]
    longest: int
    target_length: int | None
    model: nn.Module
    ends: tuple[int, ...] = ()

    @property
    def num_positions(self) -> int:
        """The maximum number of tokens that the model accepts."""
        if self.config.pretrained is None:
            return self.config.max_length
        return pretrained.num_positions(self.model) or sys.maxsize


def load_trained(path: Path, task: str, device: str = "cpu") -> Trained:
    """Load the model in evaluation mode. Raises `UserError` if it is missing, damaged, diverged, or not of `task`."""
    limit_onednn_caches()
    folder, facts = read_facts(path)
    if facts["task"] != task:
        raise UserError(f"{path}: a checkpoint of task={facts['task']}, not of task={task}")
    config, labels = ModelConfig(**facts["model"]), facts.get("labels", [])
    translation = TranslationConfig(**facts.get("translation", {}))
    roles = ("source", "target") if task == "translation" else ("text",)
    prefixes = {role: tokenizer_prefix(role, roles, config.share_embeddings) for role in roles}
    tokenizers = {role: load_tokenizer(folder, prefix) for role, prefix in prefixes.items()}
    model: nn.Module
    if config.pretrained is None:
        sizes = {role: tokenizer.vocab_size for role, tokenizer in tokenizers.items()}
        with torch.device("meta"):  # the weights are read from the file
            if task == "translation":
                model = EncoderDecoder(sizes["source"], sizes["target"], config)
            elif task == "classification":
                model = Classifier(sizes["text"], len(labels), config)
            else:
                model = LanguageModel(config.vocab_size or sizes["text"], config)
        _fill(model, StoredTensors(folder, MODEL), device)
    elif task == "classification":
        model, new = pretrained.load_classifier(folder, labels, tokenizers["text"].pad)
        if new:
            raise UserError(f"{folder / MODEL}: of another model: {new[0]} is in the model but not in the file")
        model = pretrained.ClassLogits(model).to(device)
    elif task == "translation":
        model = pretrained.load_translator(folder).to(device)
    elif config.lora_rank is not None:
        model = _merged(folder).to(device)
    else:
        model = pretrained.load_language_model(folder).to(device)
    for name, weight in model.named_parameters():
        if not weight.sum(dtype=torch.float32).isfinite():
            raise UserError(f"{path}: {name} contains NaN or infinity: the training has diverged")
    lengths = facts["longest"], facts.get("target_length")
    return Trained(config, translation, tokenizers, labels, *lengths, model.eval(), _ends(folder))


def _ends(folder: Path) -> tuple[int, ...]:
    """By the folder's generation_config.json; none by one that is damaged, which transformers ignores, too."""
    try:
        found = pretrained.eos_token_ids(json.loads((folder / pretrained.GENERATION).read_text(encoding="utf-8")))
        return tuple(number for number in found if type(number) is int)
    except (OSError, ValueError, AttributeError):
        return ()


def read_facts(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder with the files, and the contents of config.json in an exported folder, or what they would be."""
    if (path / CONFIG).is_file() and not is_run(path):
        try:
            facts = json.loads((path / CONFIG).read_text(encoding="utf-8"))
            facts = facts.get(pretrained.OURS, facts)
            known = facts["format"] == FORMAT and {"task", "model", "longest"} <= facts.keys()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            known = False
        if not known:
            raise UserError(f"{path / CONFIG}: not a configuration written by `hvd-transformer export`")
        _check_sections(path / CONFIG, facts)
        return path.resolve(), facts
    if (path / lora.ADAPTER).is_file():  # a folder of peft, which has nothing of ours
        rank = lora.check_adapters(path).get("r")
        return path.resolve(), {
            "task": "language_model",
            "model": {"pretrained": ".", "lora_rank": rank},
            "longest": sys.maxsize,
        }
    folder = resolve(path, partial(manifest.verify, unread=FOR_TRAINING))
    state = read_state(folder)
    config = state["config"]
    sections = {
        section: {name: config[key] for name in kind.model_fields if (key := f"{section}.{name}") in config}
        for section, kind in _SECTIONS
    }
    if sections["model"].get("pretrained") is not None:
        model = ModelConfig(**sections["model"])
        if model.in_own_blocks:
            sections["model"]["pretrained"] = None
        else:  # the folder itself
            sections["model"] = {"pretrained": ".", "lora_rank": model.lora_rank}
    facts = {"task": state["task"], **sections, "longest": config["data.sequence_length"]}
    if (target_length := config.get("data.target_length")) is not None:
        facts["target_length"] = target_length
    return folder, facts | ({"labels": state["labels"]} if "labels" in state else {})


def _check_sections(file: Path, facts: dict[str, Any]) -> None:
    """Raise `UserError` if another version wrote what this one does not know, or someone changed it."""
    for section, kind in _SECTIONS:
        try:
            kind.model_validate(facts.get(section, {}))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, (section, *first["loc"])))
            writer = facts.get("made_by", "an unknown version")
            raise UserError(
                f"{file}: {key}: {first['msg']}; written by {writer}, this is hvd-transformer {__version__}"
            ) from None


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """LoRA's adapters of a checkpoint or an exported folder, by the names that peft's files give them."""
    stored = StoredTensors(folder, lora.ADAPTER if (folder / lora.ADAPTER).is_file() else MODEL)
    return {lora.their_name(name): stored.whole(name) for name in stored.names}


@torch.no_grad()
def _merged(folder: Path) -> nn.Module:
    """The language model with the adapters in `folder` added to its weights."""
    model, found = lora.load_adapted(folder), read_adapters(folder)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            stored = found.pop(lora.their_name(name), None)
            if stored is None or stored.shape != weight.shape:
                raise UserError(f"{folder}: its adapters are not those of {lora.base_folder(folder)}: {name} differs")
            weight.copy_(stored)
    if found:
        raise UserError(f"{folder}: its adapters are not those of {lora.base_folder(folder)}: it lacks {min(found)}")
    if (folder / STATE).is_file():
        _check_base(model, read_state(folder), lora.base_folder(folder))
    return lora.merged(model)


def _check_base(model: nn.Module, state: dict[str, Any], base: Path) -> None:
    """Raise `UserError` if the checkpoint's adapters belong to other weights than those in the folder `base`."""
    dtype = weight_dtype(state["config"]["training.precision"])
    frozen = [weight.data.to(dtype) for weight in model.parameters() if not weight.requires_grad]
    if checksum(frozen) != state.get("frozen_checksum"):
        raise UserError(f"{base}: {lora.CHANGED_BASE}")


def _fill(model: nn.Module, stored: StoredTensors, device: str) -> None:
    """Load the weights into the model; tied weights stay tied."""
    weights = dict(model.named_parameters())
    stored.check({name: weight.shape for name, weight in weights.items()})
    loaded = {
        id(weight): nn.Parameter(stored.whole(name).to(device), requires_grad=False) for name, weight in weights.items()
    }
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = loaded[id(weight)]
