"""What a task adds to a checkpoint: facts in its state, and text files."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from hvd_transformer.checkpoint import manifest
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, OUTER, STATE, WIRE
from hvd_transformer.errors import UserError

# The keys of state.json that are not the task's.
STATE_KEYS = (
    "format", "task", "config", "data_digest", "splits", "dp", "weights_checksum", "position", "loss_scaler", "wire",
    "frozen_checksum",
)  # fmt: skip
_OURS = (STATE, manifest.NAME, *(f"{name}.index.json" for name in (MODEL, OPTIMIZER, OUTER, WIRE)))
_ENDINGS = tuple(ending for ending in manifest.SUFFIXES if ending != ".safetensors")


def check_task_entries(facts: Mapping[str, Any], files: Mapping[str, Any], tokenizer_files: Collection[str]) -> None:
    """Raise `UserError` for the `facts` and `files` of a user-defined task that a checkpoint cannot keep: they would be
    noticed when it is written, or read again."""
    if taken := sorted(set(STATE_KEYS) & facts.keys()):
        raise UserError(f"the task's `facts`: {taken[0]} is a key of the checkpoint's own; choose another one")
    try:
        json.dumps(dict(facts))
    except (TypeError, ValueError) as error:
        raise UserError(f"the task's `facts`: must be values of JSON: {error}") from None
    for name, text in files.items():
        where = f"the task's `files`: {name}"
        if "/" in name or not name.endswith(_ENDINGS):
            raise UserError(f"{where}: must be a file name that ends in {' or '.join(_ENDINGS)}")
        if name in (*_OURS, *tokenizer_files):
            raise UserError(f"{where}: is a file of the checkpoint's own; choose another name")
        if not isinstance(text, str):
            raise UserError(f"{where}: must be a text, not {type(text).__name__}")
