"""The checkpoints of a run on disk: written to a staging folder and renamed, verified before use, old ones removed.

checkpoints/step-00000200/   model.safetensors  optimizer.safetensors  state.json  tokenizer.json  MANIFEST.json
checkpoints/latest → step-00000200      checkpoints/best → step-00000150

Where compressed gradients have errors, these are in wire.safetensors. With several hosts, each host has its own files
of tensors, and an index says which tensor is where (`layout.py`).
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any
from uuid import uuid4

from hvd_transformer import atomic
from hvd_transformer.checkpoint import manifest, staging, tensor_file
from hvd_transformer.checkpoint.layout import Writers
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint, Verify
from hvd_transformer.checkpoint.staging import Writing
from hvd_transformer.checkpoint.tensor_file import FilePart
from hvd_transformer.errors import UserError

# Of checkpoints; 2 has one SHA-256 per file, and one file for the model and one for the optimizer.
FORMAT, READ_FORMATS = 3, (2, 3)
_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced-"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
OUTER = "outer.safetensors"  # of local steps
WIRE = "wire.safetensors"  # of compressed gradients
FOR_TRAINING = tuple(name.partition(".")[0] for name in (OPTIMIZER, OUTER, WIRE))  # how names of these files begin


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint, in memory. Rank 0 writes the JSON and text files."""

    step: int
    parts: Mapping[str, FilePart]  # by file
    state: Mapping[str, Any]  # JSON
    best: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)  # files by name, such as tokenizers
    indexes: Callable[[], Mapping[str, str]] = dict  # makes more of them
    writers: Writers = Writers((0,))


class CheckpointStore:
    """The `checkpoints` folder of one run.

    Rank 0 calls `begin`, every rank `staging.enter`, and then rank 0 `save` and the others that see the folder
    `save_part`.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def begin(self, step: int) -> Path:
        """Create the staging folder and enter it as rank 0. If that raises `OSError`, nothing is left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = self.folder / f".saving-{_name(step)}-{uuid4().hex[:12]}"
        folder.mkdir()
        if not staging.enter(folder, 0):
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(f"{folder}: no file can be made in it")
        return folder

    def save_part(self, snapshot: Snapshot, folder: Path, rank: int, writing: Writing) -> None:
        """Write the part of one of the other ranks. If that raises `OSError`, `save` fails on rank 0."""
        try:
            staging.report(folder, rank, _write_parts(snapshot, folder, rank, writing))
        except BaseException:
            staging.fail(folder, rank)
            raise

    def save(self, snapshot: Snapshot, folder: Path | None = None, writing: Writing | None = None) -> Path:
        """Write one checkpoint, whole or not at all. If that raises `OSError`, other checkpoints are unchanged.

        Waits for the parts of the other ranks; for a few seconds only once the job is ending, as they may be gone.
        """
        final, writing = self.folder / _name(snapshot.step), writing or Writing()
        if folder is None:
            folder = self.begin(snapshot.step)
        try:
            checksums = _write_parts(snapshot, folder, 0, writing)
            (folder / "writing-0").unlink()
            texts = {**snapshot.texts, **snapshot.indexes(), STATE: json.dumps(snapshot.state, indent=1)}
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            manifest.write(folder, checksums)
            writing.advance()
            for name in (*texts, manifest.NAME):  # each rank has synced what it wrote
                with (folder / name).open("rb") as file:
                    os.fsync(file.fileno())
            atomic.sync_folder(folder)
            if final.exists():  # the same step saved again, with the result of an evaluation
                final.rename(self.folder / f"{_REPLACED}{final.name}")
            folder.rename(final)
            atomic.sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            self._settle_replaced()
            raise
        self._settle_replaced()
        self._point("latest", final.name)
        if snapshot.best:
            self._point("best", final.name)
        self._remove_old(writing)
        return final

    def steps(self) -> list[Path]:
        """All checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step."""
        return (self.folder / _name(step)).is_dir()

    def newest_whole(self, warn: Callable[[str], None], verify: Verify = manifest.verify) -> Path | None:
        """The newest whole checkpoint. Damaged ones after it are reported to `warn` and renamed, never deleted.

        Returns None if there are no checkpoints. Raises `DamagedCheckpoint` if all are damaged, and `UserError` at one
        that cannot be read: both change nothing.
        """
        self._settle_replaced()
        damaged: list[tuple[Path, DamagedCheckpoint]] = []
        for path in reversed(self.steps()):
            try:
                verify(path)
            except DamagedCheckpoint as error:
                damaged.append((path, error))
                continue
            for other, problem in damaged:
                other.rename(_free_name(other.with_name(other.name + ".damaged")))
                warn(f"{problem}; it is set aside and the checkpoint before it is used")
            return path
        if damaged:
            raise DamagedCheckpoint(
                f"{damaged[-1][1]}; no whole checkpoint is in {self.folder}; move it away to start over"
            )
        return None

    def whole(self, step: int, verify: Verify = manifest.verify) -> Path | None:
        """The checkpoint of this step; None if there is none or it is damaged or cannot be read."""
        path = self.folder / _name(step)
        try:
            verify(path)
        except UserError:
            return None
        return path

    def clean(self, keep_best: bool = True) -> None:
        """Remove what a killed process left half written, and let `best` name what the newest checkpoint says: the link
        stayed behind if the process was killed just before, or if a damaged checkpoint was set aside. Without
        `keep_best` nothing would ever move the link, so there is none.

        Call only while no other process writes here. Raises `DamagedCheckpoint`.
        """
        if self.folder.is_dir():
            for path in self.folder.glob(".*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        if not keep_best:
            (self.folder / "best").unlink(missing_ok=True)
        elif steps := self.steps():
            step = read_state(steps[-1]).get("position", {}).get("best_step")
            if step is not None and (self.folder / _name(step)).is_dir():
                self._point("best", _name(step))

    def _settle_replaced(self) -> None:
        """Clean up after a replacement: a process killed between its two renames leaves only the older version."""
        for path in self.folder.glob(f"{_REPLACED}*"):
            final = self.folder / path.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)

    def _point(self, name: str, target: str) -> None:
        link = self.folder / f".{name}-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        link.replace(self.folder / name)
        atomic.sync_folder(self.folder)

    def _remove_old(self, writing: Writing) -> None:
        best = self.folder / "best"
        kept = best.resolve() if best.is_symlink() else None
        for path in self.steps()[: -self.keep_last]:
            if path.exists() and path.resolve() != kept:
                # Renamed first, so that nobody sees a checkpoint with only some of its files.
                trash = self.folder / f".removing-{path.name}-{os.getpid()}"
                path.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)
                writing.advance()


def resolve(path: Path, verify: Verify = manifest.verify) -> Path:
    """The checkpoint folder that a CHECKPOINT argument names: itself, or the best (else newest) of a run directory.

    Raises `UserError` if it does not exist or is damaged.
    """
    run = path / "checkpoints"
    if run.is_dir():
        steps = CheckpointStore(run, keep_last=1).steps()
        if not steps:
            raise UserError(f"{path}: the run directory has no checkpoint")
        path = run / "best" if (run / "best").exists() else steps[-1]
    verify(path)
    return path.resolve()


def read_state(folder: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint. Raises `DamagedCheckpoint`, and `UserError` if it cannot be read."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise manifest.unreadable(folder / STATE, error) from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{folder / STATE}: damaged: {error}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder / STATE}: must hold a JSON object")
    return state


def read_current_state(folder: Path) -> dict[str, Any]:
    """Like `read_state`. Raises `UserError` if this version does not read the checkpoint's format."""
    state = read_state(folder)
    if state.get("format") not in READ_FORMATS:
        formats = " and ".join(map(str, READ_FORMATS))
        raise UserError(f"{folder}: format {state.get('format')}, but this version reads formats {formats}")
    return state


def _write_parts(snapshot: Snapshot, folder: Path, rank: int, writing: Writing) -> staging.Checksums:
    """Write this rank's part; the checksums of it and of the ranks that report to this one."""
    own = {name: tensor_file.write(folder / name, part, writing.advance) for name, part in snapshot.parts.items()}
    reported = staging.collect(folder, rank, snapshot.writers, writing)
    return {name: own.get(name, []) + reported.get(name, []) for name in own.keys() | reported.keys()}


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _free_name(path: Path) -> Path:
    """The path, or the path with the first free number."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(free for free in chain([path], numbered) if not free.exists())
