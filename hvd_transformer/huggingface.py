"""Loads Hugging Face folders with transformers, an optional dependency. Nothing is downloaded."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from hvd_transformer.errors import UserError, missing_extra

_MOST_SAID = 300  # characters of an error of transformers


def origin(folder: Path) -> str:
    """The start of every message about the folder."""
    return f"model.pretrained={folder}"


def from_folder(kind: str, folder: Path, given: str | None = None, **options: Any) -> Any:
    """`transformers.<kind>.from_pretrained(folder)`. Raises `UserError`, which begins with `given` (None: `origin`), if
    transformers is not installed, or the folder is incomplete."""
    if given is None and not (folder / "config.json").is_file():
        raise UserError(f"{origin(folder)}: must be a folder with config.json, model.safetensors and a tokenizer")
    given = given or origin(folder)
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise missing_extra(given, "transformers", "pretrained") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    fixed = {"local_files_only": True, "trust_remote_code": False}  # no downloads, no code from the folder
    try:
        return getattr(transformers, kind).from_pretrained(folder, **fixed, **options)
    except Exception as error:  # the type depends on the damage
        said = shorten(str(error), _MOST_SAID, placeholder=" …")  # on one line
        raise UserError(f"{given}: cannot be read: {type(error).__name__}: {said}") from None
