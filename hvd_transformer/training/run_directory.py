"""Claims `output_dir`: is it a run directory, can it be written, and is there a checkpoint to resume from?

Nothing is written before all input has been checked: a refused start leaves the folder as it was.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hvd_transformer import atomic
from hvd_transformer.checkpoint import manifest
from hvd_transformer.checkpoint.manifest import Verify
from hvd_transformer.checkpoint.store import CheckpointStore, read_state, resolve
from hvd_transformer.config import Config, dump
from hvd_transformer.config.schema import check_new_run, flatten, may_change
from hvd_transformer.errors import UserError
from hvd_transformer.folder_lock import FolderLock
from hvd_transformer.own_folder import make_own_folder
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import ExampleTask

_BATCH_SIZE = "batch_size.json"
_LOG = re.compile(r"rank-.*\.log|beat-.*|launch\.log")


class RunDirectory:
    """The folder of one run. Rank 0 claims and writes it; every rank keeps a log in it."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir).expanduser()
        self.store = CheckpointStore(self.path / "checkpoints", config.checkpoint.keep_last)
        self._lock = FolderLock(self.path / ".lock", "hvd-train")
        self._made: list[Path] = []  # folders that `claim` created, the innermost first

    def claim(self, config: Config, warn: Callable[[str], None], verify: Verify = manifest.verify) -> Path | None:
        """Create the folder or take an earlier run's; returns the checkpoint to resume from, if any.

        `begin` or `abandon` follows. Raises `UserError` and changes nothing if the folder is not a run directory,
        cannot be written, or holds a run with a different configuration.
        """
        self._check_folder()
        try:
            self._take(warn)
            check_new_run(config.checkpoint.resume, self.path)
            checkpoint = self.store.newest_whole(warn, verify)
            if checkpoint is None and config.checkpoint.resume not in ("auto", "never"):
                checkpoint = resolve(Path(config.checkpoint.resume).expanduser(), verify)
            if checkpoint is not None:
                check_agreement(config, checkpoint)
        except UserError:
            self.abandon()
            raise
        return checkpoint

    def check_files(self, rank: int) -> None:
        """Raise `UserError` if there is a file that this rank would append to, and cannot."""
        names = [f"logs/rank-{rank:03d}.log", *(["metrics.jsonl", "samples.jsonl"] if rank == 0 else [])]
        for name in names:
            if (self.path / name).exists() and not os.access(self.path / name, os.W_OK):
                raise UserError(f"output_dir={self.path}: {name} cannot be written")

    def holds(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is this run's own, and not one of another run that this one begins with."""
        return checkpoint.parent.resolve() == self.store.folder.resolve()

    def batch_size(self) -> dict[str, Any] | None:
        """What an earlier start has found for `training.batch_size=auto`, as it was given to `begin`."""
        try:
            found = json.loads((self.path / _BATCH_SIZE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and isinstance(found.get("batch_size"), int) else None

    def begin(
        self, config: Config, rank: int, *, first_on_host: bool, batch_size: Mapping[str, Any] | None = None
    ) -> None:
        """Write what a run starts with, and remove the heartbeats of an earlier run.

        `batch_size`: what was found for `training.batch_size=auto`. Every rank calls it; the first one on each host
        removes, because the folder may be that host's own.
        """
        try:
            if rank == 0:
                self.store.clean(config.checkpoint.keep_best)
                atomic.write_text(self.path / "config.yaml", dump(config))
                if batch_size is not None:
                    atomic.write_text(self.path / _BATCH_SIZE, json.dumps(batch_size, indent=1) + "\n")
            make_own_folder(self.path / "logs")
            if first_on_host:
                for heartbeat in (self.path / "logs").glob("beat-*"):
                    heartbeat.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"output_dir={self.path}: cannot be written: {error.strerror}") from None

    def abandon(self) -> None:
        """Restore the folder to what it was before `claim`."""
        self.release()
        for folder in self._made:
            with suppress(OSError):  # not empty any more
                folder.rmdir()

    def check(self) -> None:
        """Raise `UserError` if another job has taken the folder, as after this one was suspended for long."""
        if self._lock.lost:
            taken = self._lock.owner() or "another job, which has ended"
            raise UserError(f"output_dir={self.path}: taken over by {taken}; this job ends")

    def _take(self, warn: Callable[[str], None]) -> None:
        """Keep other jobs out: they would remove each other's files."""
        try:
            self._lock.take(warn)
        except UserError as error:
            raise UserError(f"output_dir={error}") from None
        except OSError as error:
            raise UserError(f"output_dir={self.path}: cannot be written: {error.strerror}") from None

    def _check_folder(self) -> None:
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            make_own_folder(self.path)
            present = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise UserError(f"output_dir={self.path}: cannot be made: {error.strerror}") from None
        except UserError as error:
            raise UserError(f"output_dir={error}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UserError(f"output_dir={self.path}: cannot be written")
        # A start that was killed early leaves dot files, a rank on another host than rank 0's its log, and a detached
        # launcher its own log and how the start failed. A mounted file system has lost+found.
        others = [name for name in present if not name.startswith(".") and name not in ("exit.json", "lost+found")]
        logs = [log.name for log in (self.path / "logs").glob("*")]
        logs_alone = others == ["logs"] and all(map(_LOG.fullmatch, logs))
        if others and not logs_alone and not self._is_ours():
            raise UserError(
                f"output_dir={self.path}: holds other files ({others[0]}) and is not a run directory; "
                "choose a new or empty folder"
            )

    def release(self) -> None:
        """Let other jobs in."""
        self._lock.release()

    def _is_ours(self) -> bool:
        """Whether the folder has a configuration of hvd-train, perhaps of another version with other keys."""
        try:
            content = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return False
        return isinstance(content, dict) and content.keys() >= {"output_dir", "task", "model", "data"}


def check_agreement(config: Config, checkpoint: Path) -> None:
    """Raise `UserError` with the first key that must equal the checkpoint's and does not."""
    wanted, state = flatten(config), read_state(checkpoint)
    # With columns, the batch size is the number of columns and so defines the samples.
    fixed = {"training.batch_size"} if config.data.batching == "columns" else set()
    made_with = state.get("config", {})
    differing = [key for key, value in made_with.items() if key in wanted and wanted[key] != value]
    cutting = _batch_keys(config).intersection(differing)
    in_epoch = cutting if cutting and _batches_remain(config, state) else set()
    for key in differing:
        if key in fixed or key in in_epoch or not may_change(key):
            here, there = (
                yaml.safe_dump(item, default_flow_style=True).split("\n")[0] for item in (wanted[key], made_with[key])
            )
            until = ", which cuts its batches until the end of the epoch" if key in in_epoch else ""
            raise UserError(
                f"{key}={here}: the checkpoint {checkpoint} was made with {key}={there}{until}; use that value, "
                "or another output_dir for a new run"
            )


def epoch_batch_size(config: Config, checkpoint: Path) -> int | None:
    """What `training.batch_size=auto` is until the checkpoint's epoch ends, of which batches remain; None: any."""
    state = read_state(checkpoint)
    size: int = state["config"]["training.batch_size"]
    return size if _batches_remain(config, state) else None


def _batch_keys(config: Config) -> set[str]:
    """The keys that say how an `ExampleTask` cuts its samples into batches."""
    by_number = config.data.batch_tokens is None and config.training.batch_size != "auto"
    return {"data.batch_tokens", "training.batch_size"} if by_number else {"data.batch_tokens"}


def _batches_remain(config: Config, state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is in mid-epoch, and what remains of the epoch are batches: others have other samples."""
    return state.get("position", {}).get("remaining") is not None and issubclass(task_class(config), ExampleTask)
