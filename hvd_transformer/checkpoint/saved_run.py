"""Reads the state and tokenizers of a saved run, and tells what kind of folder it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_transformer.checkpoint import manifest
from hvd_transformer.checkpoint.manifest import Verify
from hvd_transformer.checkpoint.store import STATE, read_current_state, resolve
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.plugin import KEPT_CODE

CONFIG = "config.json"


def is_run(path: Path) -> bool:
    """Whether the folder is a run directory or a checkpoint."""
    return (path / "checkpoints").is_dir() or (path / STATE).is_file()


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder has besides tensors."""

    folder: Path
    state: dict[str, Any]
    tokenizers: dict[str, Tokenizer]  # by the prefix of their file names

    @property
    def kept_code(self) -> Path | None:
        """The folder with the code that the training service kept with the run; None if there is none."""
        checkpoints = self.folder.parent
        code = checkpoints.parent / KEPT_CODE
        return code if checkpoints.name == "checkpoints" and code.is_dir() else None


def read_checkpoint(path: Path, verify: Verify = manifest.verify) -> Checkpoint:
    """Read a checkpoint, or the best (else newest) one of a run directory. Raises `UserError` if there is none."""
    if (path / CONFIG).is_file() and not is_run(path):
        raise UserError(
            f"{path}: a model's folder, which does not say what its data was; evaluate takes the checkpoint or run "
            "directory that it was exported from"
        )
    folder = resolve(path, verify)
    state = read_current_state(folder)
    prefixes = {
        file.name.removesuffix(name)
        for name in ("tokenizer.json", "vocabulary.json")
        for file in folder.glob(f"*{name}")
    }
    return Checkpoint(folder, state, {prefix: load_tokenizer(folder, prefix) for prefix in sorted(prefixes)})
