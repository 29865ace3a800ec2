"""Hugging Face folders through transformers, an optional extra. Nothing is fetched."""

from pathlib import Path
from typing import Any

from hvd_transformer.errors import UserError


def origin(folder: Path) -> str:
    """What a message about the folder begins with."""
    return f"model.pretrained={folder}"


def from_folder(kind: str, folder: Path, **options: Any) -> Any:
    """`transformers.<kind>.from_pretrained(folder)`. Raises `UserError` where it is not installed, or the folder not
    whole."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{origin(folder)}: must be a folder with config.json, model.safetensors and a tokenizer")
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise UserError(
            f"{origin(folder)}: needs transformers; install it with: pip install 'hvd-transformer[pretrained]'"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    fixed = {"local_files_only": True, "trust_remote_code": False}  # neither fetched nor of the folder's own code
    try:
        return getattr(transformers, kind).from_pretrained(folder, **fixed, **options)
    except Exception as error:  # each kind of damage has another
        said = str(error).strip().splitlines() or [""]
        raise UserError(f"{origin(folder)}: cannot be read: {type(error).__name__}: {said[0]}") from None
