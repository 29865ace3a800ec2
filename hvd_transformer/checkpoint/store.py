"""A run's checkpoints on disk: written aside and renamed, verified before use, old ones removed.

checkpoints/step-00000200/   model.safetensors  optimizer.safetensors  state.json  tokenizer.json  MANIFEST.json
checkpoints/latest → step-00000200      checkpoints/best → step-00000150
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from hvd_transformer.checkpoint import manifest, tensor_file
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.tensor_file import TensorShard
from hvd_transformer.errors import UserError

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced-"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
# Between two looks at whether the other ranks have written theirs.
_POLL_SECONDS = 0.05
# How long they have for it when this job ends because of an error.
_LAST_SECONDS = 10.0


@dataclass(frozen=True)
class Snapshot:
    """What this rank has of a checkpoint, in memory: of all tensors by file and name, the JSON-able state, and
    text files by name, such as tokenizers."""

    step: int
    tensors: Mapping[str, Mapping[str, TensorShard]]
    state: Mapping[str, Any]
    best: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)


class CheckpointStore:
    """The `checkpoints` folder of one run.

    Rank 0 saves: `begin`, then `save`. Other ranks that have a part of the tensors add it with `save_part` between the
    two, into the folder that `begin` made.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def begin(self, snapshot: Snapshot, others: Collection[int] = ()) -> Path:
        """Makes the folder aside, with files for the whole tensors, which this rank and the `others` will write.

        Raises `OSError` and leaves nothing.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".saving-{_name(snapshot.step)}-{uuid4().hex[:12]}"
        try:
            aside.mkdir()
            for name, fragments in snapshot.tensors.items():
                tensor_file.create(aside / name, fragments)
            for rank in others:
                _missing(aside, rank).touch()
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return aside

    def save_part(self, parts: Iterable[Snapshot], aside: Path, rank: int) -> None:
        """Writes what one of the others has. Raises `OSError`, and `save` fails."""
        missing = _missing(aside, rank)
        try:
            for part in parts:
                _write_tensors(part, aside)
            missing.unlink()
        except BaseException:
            missing.rename(_failed(aside, rank))  # which needs no room on the disk
            raise

    def save(
        self, snapshot: Snapshot, aside: Path | None = None, others: Collection[int] = (), ending: Event | None = None
    ) -> Path:
        """Writes one checkpoint, whole or not at all. Raises `OSError` and leaves the others as they were.

        Waits for the parts of the `others`, but not long after `ending` is set: they may have gone.
        """
        final = self.folder / _name(snapshot.step)
        if aside is None:
            aside = self.begin(snapshot)
        try:
            _write_tensors(snapshot, aside)
            _wait_for(others, aside, ending)
            for name, text in snapshot.texts.items():
                (aside / name).write_text(text, encoding="utf-8")
            (aside / STATE).write_text(json.dumps(snapshot.state, indent=1), encoding="utf-8")
            manifest.write(aside)
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
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / STATE}: damaged: {error}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder / STATE}: must hold a JSON object")
    return state


def _write_tensors(snapshot: Snapshot, aside: Path) -> None:
    for name, fragments in snapshot.tensors.items():
        tensor_file.write(aside / name, fragments)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _missing(aside: Path, rank: int) -> Path:
    """This file is there until the rank has written its part."""
    return aside / f"missing-{rank}"


def _failed(aside: Path, rank: int) -> Path:
    """This one is there when the rank could not."""
    return aside / f"failed-{rank}"


def _wait_for(others: Collection[int], aside: Path, ending: Event | None) -> None:
    limit = float("inf")
    for rank in others:
        while _is_there(_missing(aside, rank)):
            if ending is not None and ending.is_set():
                limit = min(limit, time.monotonic() + _LAST_SECONDS)
            if time.monotonic() > limit:
                raise OSError(f"rank {rank} has not written its part")
            time.sleep(_POLL_SECONDS)
        if _is_there(_failed(aside, rank)):
            raise OSError(f"rank {rank} could not write its part; its log says why")


def _is_there(path: Path) -> bool:
    try:
        path.open("rb").close()  # asks the server, where the folder is on a network
    except FileNotFoundError:
        return False
    return True


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
