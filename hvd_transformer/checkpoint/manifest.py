"""MANIFEST.json: the size and checksum of every file of a checkpoint, to detect damage before loading."""

import hashlib
import json
from pathlib import Path

from hvd_transformer.errors import UserError

NAME = "MANIFEST.json"
SUFFIXES = (".safetensors", ".json")


class DamagedCheckpoint(UserError):
    """A damaged checkpoint; the message names the file and the damage."""


def write(folder: Path) -> None:
    """Write the manifest of all files in the folder."""
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    (folder / NAME).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def verify(folder: Path) -> None:
    """Raise `DamagedCheckpoint` unless the folder has exactly the listed files, undamaged and in safe formats."""
    if not folder.is_dir():
        raise DamagedCheckpoint(f"{folder}: no such checkpoint folder")
    try:
        files = json.loads((folder / NAME).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder}: no checkpoint: {NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder / NAME}: damaged: {error}") from None
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES:
            raise DamagedCheckpoint(
                f"{path}: not a file of a checkpoint; only {' and '.join(SUFFIXES)} files are ever read, never pickles"
            )
        if path.name not in expected and path.name != NAME:
            raise DamagedCheckpoint(f"{path}: not in {NAME}")
    for name, (size, checksum) in expected.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise DamagedCheckpoint(f"{path}: missing")
        if path.stat().st_size != size:
            raise DamagedCheckpoint(f"{path}: truncated: {path.stat().st_size} bytes of {size}")
        if _sha256(path) != checksum:
            raise DamagedCheckpoint(f"{path}: damaged: its checksum is not the one in {NAME}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
