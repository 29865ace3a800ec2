"""The checkpoints of a run on disk: written to a staging folder and renamed, verified before use, old ones removed.

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
from itertools import chain, count
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from hvd_transformer import atomic
from hvd_transformer.checkpoint import manifest, tensor_file
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.tensor_file import TensorShard
from hvd_transformer.errors import UserError

FORMAT = 2  # of checkpoints
_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced-"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
# The interval at which rank 0 checks whether the other ranks have written their parts.
_POLL_SECONDS = 0.05
# How long rank 0 waits for them if the job is ending because of an error.
_LAST_SECONDS = 10.0


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint, in memory."""

    step: int
    tensors: Mapping[str, Mapping[str, TensorShard]]  # by file, then by name
    state: Mapping[str, Any]  # JSON
    best: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)  # files by name, such as tokenizers


class CheckpointStore:
    """The `checkpoints` folder of one run.

    Rank 0 calls `begin` and `save`. Between the two, the other ranks that have a part of the tensors write it with
    `save_part` into the staging folder that `begin` created.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def begin(self, snapshot: Snapshot, others: Collection[int] = ()) -> Path:
        """Create the staging folder, with files of full size for this rank and the `others` to write into.

        Raises `OSError` and leaves nothing behind if that fails.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        staging = self.folder / f".saving-{_name(snapshot.step)}-{uuid4().hex[:12]}"
        try:
            staging.mkdir()
            for name, shards in snapshot.tensors.items():
                tensor_file.create(staging / name, shards)
            for rank in others:
                _missing_marker(staging, rank).touch()
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return staging

    def save_part(self, parts: Iterable[Snapshot], staging: Path, rank: int) -> None:
        """Write the part of one of the other ranks. If that raises `OSError`, `save` fails on rank 0."""
        missing = _missing_marker(staging, rank)
        try:
            for part in parts:
                _write_tensors(part, staging)
            missing.unlink()
        except BaseException:
            missing.rename(_failed_marker(staging, rank))  # works on a full disk
            raise

    def save(
        self, snapshot: Snapshot, staging: Path | None = None, others: Collection[int] = (), ending: Event | None = None
    ) -> Path:
        """Write one checkpoint, whole or not at all. If that raises `OSError`, other checkpoints are unchanged.

        Waits for the parts of the `others`; for a few seconds only once `ending` is set, as they may be gone.
        """
        final = self.folder / _name(snapshot.step)
        if staging is None:
            staging = self.begin(snapshot)
        try:
            _write_tensors(snapshot, staging)
            _wait_for_parts(others, staging, ending)
            for name, text in snapshot.texts.items():
                (staging / name).write_text(text, encoding="utf-8")
            (staging / STATE).write_text(json.dumps(snapshot.state, indent=1), encoding="utf-8")
            manifest.write(staging)
            for path in staging.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            atomic.sync_folder(staging)
            if final.exists():  # the same step saved again, with the result of an evaluation
                final.rename(self.folder / f"{_REPLACED}{final.name}")
            staging.rename(final)
            atomic.sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            self._settle_replaced()
            raise
        self._settle_replaced()
        self._point("latest", final.name)
        if snapshot.best:
            self._point("best", final.name)
        self._remove_old()
        return final

    def steps(self) -> list[Path]:
        """All checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def newest_whole(self, warn: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint. Damaged ones are reported to `warn` and renamed, never deleted.

        Returns None if there are no checkpoints. Raises `DamagedCheckpoint` if all are damaged.
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
                f"{last}; no whole checkpoint is left in {self.folder}; delete the folder to start over"
            )
        return None

    def best(self) -> Path | None:
        """The best checkpoint; None if there is none or it is damaged."""
        path = self.folder / "best"
        try:
            manifest.verify(path)
        except DamagedCheckpoint:
            return None
        return path.resolve()

    def clean(self) -> None:
        """Remove what a killed process left half written. Call only while no other process writes here."""
        if self.folder.is_dir():
            for path in self.folder.glob(".*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

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

    def _remove_old(self) -> None:
        best = self.folder / "best"
        kept = best.resolve() if best.is_symlink() else None
        for path in self.steps()[: -self.keep_last]:
            if path.exists() and path.resolve() != kept:
                # Renamed first, so that nobody sees a checkpoint with only some of its files.
                trash = self.folder / f".removing-{path.name}-{os.getpid()}"
                path.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)


def resolve(path: Path) -> Path:
    """The checkpoint folder that a CHECKPOINT argument names: itself, or the best (else newest) of a run directory.

    Raises `UserError` if it does not exist or is damaged.
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
    """Read state.json of a checkpoint. Raises `DamagedCheckpoint`."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / STATE}: damaged: {error}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder / STATE}: must hold a JSON object")
    return state


def read_current_state(folder: Path) -> dict[str, Any]:
    """Like `read_state`. Raises `UserError` if this version does not read the checkpoint's format."""
    state = read_state(folder)
    if state.get("format") != FORMAT:
        raise UserError(f"{folder}: format {state.get('format')}, but this version reads format {FORMAT}")
    return state


def _write_tensors(snapshot: Snapshot, staging: Path) -> None:
    for name, shards in snapshot.tensors.items():
        tensor_file.write(staging / name, shards)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _missing_marker(staging: Path, rank: int) -> Path:
    """The marker file that exists until the rank has written its part."""
    return staging / f"missing-{rank}"


def _failed_marker(staging: Path, rank: int) -> Path:
    """The marker file that exists if the rank could not write its part."""
    return staging / f"failed-{rank}"


def _wait_for_parts(others: Collection[int], staging: Path, ending: Event | None) -> None:
    limit = float("inf")
    for rank in others:
        while _exists(_missing_marker(staging, rank)):
            if ending is not None and ending.is_set():
                limit = min(limit, time.monotonic() + _LAST_SECONDS)
            if time.monotonic() > limit:
                raise OSError(f"rank {rank} has not written its part")
            time.sleep(_POLL_SECONDS)
        if _exists(_failed_marker(staging, rank)):
            raise OSError(f"rank {rank} could not write its part; its log says why")


def _exists(path: Path) -> bool:
    try:
        path.open("rb").close()  # on a network file system, opening asks the server
    except FileNotFoundError:
        return False
    return True


def _free_name(path: Path) -> Path:
    """The path, or the path with the first free number."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(free for free in chain([path], numbered) if not free.exists())
