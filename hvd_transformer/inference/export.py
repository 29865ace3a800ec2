"""Write a folder with what is needed to use a trained model: as `trained_model` loads it, or as transformers does."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from hvd_transformer import __version__, atomic
from hvd_transformer.checkpoint.saved_run import CONFIG
from hvd_transformer.checkpoint.store import MODEL
from hvd_transformer.data.as_transformers_tokenizer import transformers_files
from hvd_transformer.errors import UserError
from hvd_transformer.inference.trained_model import FORMAT, load_trained, read_facts
from hvd_transformer.models import pretrained
from hvd_transformer.models.as_transformers import as_transformers

_EXPORTED = (
    "model*.safetensors",
    f"{MODEL}.index.json",
    "*tokenizer.json",
    "*vocabulary.json",
    "*_config.json",
    "special_tokens_map.json",
    "*.jinja",
)


def export(path: Path, folder: Path) -> None:
    """Write a folder with only what is needed to use the model of a checkpoint.

    Raises `UserError` if the folder is not empty or cannot be written.
    """
    source, facts = read_facts(path)
    _check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in [path for pattern in _EXPORTED for path in source.glob(pattern)]:
            shutil.copyfile(file, folder / file.name)
        facts = {"format": FORMAT, "made_by": f"hvd-transformer {__version__}", **facts}
        if facts["model"].get("pretrained") is not None:
            facts = json.loads((source / CONFIG).read_text(encoding="utf-8")) | {pretrained.OURS: facts}
        # Written last: without it the folder is not recognized.
        atomic.write_text(folder / CONFIG, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
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


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; choose a new or empty folder")
