"""A run's checkpoints on disk: written aside and renamed, verified before use, old ones removed.

checkpoints/step-00000200/   model.safetensors  optimizer.safetensors  state.json  MANIFEST.json
checkpoints/latest → step-00000200      checkpoints/best → step-00000150
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hvd_transformer.checkpoint import manifest
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.errors import UserError

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced-"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """All of a checkpoint in memory: tensors by file and name, and the JSON-able state."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    best: bool = False


class CheckpointStore:
    """The `checkpoints` folder of one run. Only rank 0 writes."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def save(self, snapshot: Snapshot) -> Path:
        """Writes one checkpoint, whole or not at all. Raises `OSError` and leaves the others as they were."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{snapshot.step:08d}"
        aside = self.folder / f".saving-{final.name}-{os.getpid()}"
        try:
            aside.mkdir()
            for name, tensors in snapshot.tensors.items():
                save_tensors(aside / name, tensors)
            (aside / "state.json").write_text(json.dumps(snapshot.state, indent=1), encoding="utf-8")
            manifest.write(aside)
            for path in aside.iterdir():  # safetensors makes its files readable by the owner alone
                shutil.copymode(aside / manifest.NAME, path)
            for path in aside.iterdir():
                _sync(path)
            _sync(aside)
            if final.exists():  # the same step once more, with what an evaluation added
                final.rename(self.folder / f"{_REPLACED}{final.name}")
            aside.rename(final)
            _sync(self.folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            self._settle_replaced()
            raise
        self._settle_replaced()
        self._point("latest", final.name)
        if snapshot.best:
            self._point("best", final.name)
        self._remove_old()
        return final

    def steps(self) -> list[Path]:
        """The checkpoints there are, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def newest_whole(self, warn: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that is whole; damaged ones are reported and set aside, never deleted.

        Raises `DamagedCheckpoint` where there are checkpoints and none is whole.
        """
        self._settle_replaced()
        last: DamagedCheckpoint | None = None
        for path in reversed(self.steps()):
            try:
                manifest.verify(path)
                return path
            except DamagedCheckpoint as error:
                last = error
                path.rename(_free_name(path.with_name(path.name + ".damaged")))
                warn(f"{error}; it is set aside and the checkpoint before it is used")
        if last is not None:
            raise DamagedCheckpoint(
                f"{last}; no whole checkpoint is left in {self.folder}; delete the folder to begin again"
            )
        return None

    def best(self) -> Path | None:
        """The best checkpoint, where there is one and it is whole."""
        path = self.folder / "best"
        try:
            manifest.verify(path)
        except DamagedCheckpoint:
            return None
        return path.resolve()

    def clean(self) -> None:
        """Removes what a killed process left half written. Call while no other process writes here."""
        if self.folder.is_dir():
            for path in self.folder.glob(".*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def _settle_replaced(self) -> None:
        """A writer killed between its two renames leaves only the older version, under another name."""
        for path in self.folder.glob(f"{_REPLACED}*"):
            final = self.folder / path.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)

    def _point(self, name: str, target: str) -> None:
        aside = self.folder / f".{name}-{os.getpid()}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(target)
        aside.replace(self.folder / name)
        _sync(self.folder)

    def _remove_old(self) -> None:
        best = self.folder / "best"
        kept = best.resolve() if best.is_symlink() else None
        for path in self.steps()[: -self.keep_last]:
            if path.resolve() != kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first: a checkpoint is never seen with half its files.
        if path.exists():
            trash = self.folder / f".removing-{path.name}-{os.getpid()}"
            path.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)


def resolve(path: Path) -> Path:
    """The checkpoint folder that a CHECKPOINT argument names: itself, or a run directory's best (else newest).

    Raises `UserError` unless it is there and whole.
    """
    run = path / "checkpoints"
    if run.is_dir():
        steps = CheckpointStore(run, keep_last=1).steps()
        if not steps:
            raise UserError(f"{path}: the run directory has no checkpoint")
        path = run / "best" if (run / "best").exists() else steps[-1]
    manifest.verify(path)
    return path.resolve()


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / 'state.json'}: damaged: {error}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder / 'state.json'}: must hold a JSON object")
    return state


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes named tensors; a full disk is an `OSError`, as from any other file."""
    try:
        save_file(dict(tensors), file)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_tensors(file: Path, into: Mapping[str, Tensor]) -> None:
    """Copies a safetensors file's tensors into the given ones, one at a time.

    Raises `UserError` where names or shapes are not those of the file.
    """
    for name, value in stream_tensors(file, {name: tensor.shape for name, tensor in into.items()}):
        into[name].copy_(value)


def stream_tensors(file: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """A safetensors file's tensors with their names, one at a time, in the order of `shapes`.

    Raises `UserError` at once where names or shapes are not those of the file.
    """
    with _reading(file), safe_open(file, framework="pt") as opened:
        if odd := sorted(set(opened.keys()) ^ set(shapes)):
            where = "in the model but not in the file" if odd[0] in shapes else "in the file but not in the model"
            raise UserError(f"{file}: of another model: {odd[0]} is {where}")
        for name, shape in shapes.items():
            found = opened.get_slice(name).get_shape()
            if list(found) != list(shape):
                raise UserError(f"{file}: of another model: {name} is {list(found)}, not {list(shape)}")
    return _stream(file, shapes)


def _stream(file: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    with _reading(file), safe_open(file, framework="pt") as opened:
        for name in names:
            yield name, opened.get_tensor(name)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{file}: no valid safetensors file: {error}") from None


def _free_name(path: Path) -> Path:
    number = 0
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
