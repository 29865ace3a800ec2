"""Write a folder with what is needed to use a trained model: as `trained_model` loads it, or as transformers does."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from hvd_transformer import __version__, atomic
from hvd_transformer.checkpoint.saved_run import CONFIG
from hvd_transformer.checkpoint.store import MODEL
from hvd_transformer.data.as_transformers_tokenizer import transformers_files
from hvd_transformer.errors import UserError
from hvd_transformer.inference.trained_model import FORMAT, load_trained, read_adapters, read_facts
from hvd_transformer.models import lora, pretrained
from hvd_transformer.models.as_transformers import as_transformers

_MODEL = ("model*.safetensors", f"{MODEL}.index.json", "generation_config.json")
_TOKENIZERS = (
    "*tokenizer.json",
    "*vocabulary.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "*.jinja",
)


def export(path: Path, folder: Path) -> None:
    """Write a folder with only what is needed to use the model of a checkpoint; with LoRA, peft's folder of adapters.

    Raises `UserError` if the folder is not empty or cannot be written.
    """
    source, facts = read_facts(path)
    _check_new(folder)
    adapters = facts["model"].get("lora_rank") is not None
    patterns = (*_TOKENIZERS, lora.ADAPTER_CONFIG) if adapters else (*_TOKENIZERS, *_MODEL)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in [path for pattern in patterns for path in source.glob(pattern)]:
            shutil.copyfile(file, folder / file.name)
        if adapters:
            save_file(read_adapters(source), folder / lora.ADAPTER, {"format": "pt"})
        else:
            _write_config(folder, facts, None if facts["model"].get("pretrained") is None else source)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None


def export_merged(path: Path, folder: Path) -> None:
    """Write a Hugging Face folder whose weights are those that LoRA's adapters were trained on, and the adapters added.

    Raises `UserError` if there are no adapters, the folder is not empty or cannot be written.
    """
    source, facts = read_facts(path)
    if facts["model"].get("lora_rank") is None:
        raise UserError(f"--merge: {path}: its model has no adapters (model.lora_rank); leave out --merge")
    _check_new(folder)
    trained = load_trained(path, facts["task"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trained.model.save_pretrained(folder)  # type: ignore[operator]
        for name, text in trained.tokenizers["text"].files().items():
            (folder / name).write_text(text, encoding="utf-8")
        _write_config(folder, {**facts, "model": {"pretrained": "."}}, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None


def export_transformers(path: Path, folder: Path) -> str:
    """Write a folder that transformers reads. Returns a sentence about it.

    Raises `UserError` if no class of transformers is the same model, the folder is not empty or cannot be written.
    """
    _, facts = read_facts(path)
    if facts["task"] != "language_model" or facts["model"].get("pretrained") is not None:
        is_one = facts["model"].get("pretrained") is not None
        why = "is a Hugging Face folder already; leave out --format" if is_one else "only for task=language_model"
        raise UserError(f"--format transformers: {path}: {why}")
    trained = load_trained(path, "language_model")
    made = as_transformers(trained.config, {name: weight.data for name, weight in trained.model.named_parameters()})
    texts = transformers_files(trained.tokenizers["text"], trained.num_positions)
    own = {"format": FORMAT, "made_by": f"hvd-transformer {__version__}", **facts, "model": {"pretrained": "."}}
    _check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        save_file(made.weights, folder / MODEL, {"format": "pt"})
        config = json.dumps({**made.config, pretrained.OURS: own}, indent=1, ensure_ascii=False)
        atomic.write_text(folder / CONFIG, config + "\n")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    more = f"; its output layer is not tied: {made.untied:,} more parameters" if made.untied else ""
    return f"{made.config['architectures'][0]} of transformers{more}"


def _write_config(folder: Path, facts: Mapping[str, Any], theirs: Path | None) -> None:
    """Write config.json, last of all: without it the folder is not recognized. `theirs` has the file of transformers
    that it extends."""
    config: dict[str, Any] = {"format": FORMAT, "made_by": f"hvd-transformer {__version__}", **facts}
    if theirs is not None:
        config = json.loads((theirs / CONFIG).read_text(encoding="utf-8")) | {pretrained.OURS: config}
    atomic.write_text(folder / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; choose a new or empty folder")
