"""Claiming `output_dir`: is it ours, can it be written, and is there a checkpoint to go on from?

Nothing is written before all input was found right: a start that is refused leaves what it found.
"""

import fcntl
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from hvd_transformer import atomic
from hvd_transformer.checkpoint.store import CheckpointStore, read_state, resolve
from hvd_transformer.config import Config, dump, load_file
from hvd_transformer.config.schema import flatten, may_change
from hvd_transformer.errors import UserError

# A job that was just killed may take a moment to be gone.
LOCK_SECONDS = 5.0


class RunDirectory:
    """The folder of one run. Rank 0's process claims it and writes to it; every rank keeps a log in it."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir).expanduser()
        self.store = CheckpointStore(self.path / "checkpoints", config.checkpoint.keep_last)
        self._release: Callable[[], object] | None = None
        self._made: list[Path] = []  # folders, the innermost first

    def claim(self, config: Config, warn: Callable[[str], None]) -> Path | None:
        """Makes the folder or takes an earlier run's; returns the checkpoint to go on from, if any.

        `begin` or `abandon` follows. Raises `UserError` and loses nothing where the folder is another's,
        cannot be written, or holds a run whose configuration does not agree.
        """
        self._check_folder()
        self._lock()
        try:
            return self._take(config, warn)
        except UserError:
            self.abandon()
            raise

    def begin(self, config: Config, rank: int) -> None:
        """Writes what a run starts with. Every rank calls it: on another host the folder is that host's own."""
        try:
            if rank == 0:
                self.store.clean()
                atomic.write_text(self.path / "config.yaml", dump(config))
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            for heartbeat in (self.path / "logs").glob("beat-*"):  # of an earlier run
                heartbeat.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"output_dir={self.path}: cannot be written: {error.strerror}") from None

    def abandon(self) -> None:
        """Leaves the folder as it was before `claim`."""
        for folder in self._made:
            with suppress(OSError):  # something is in it by now
                folder.rmdir()
        self.release()

    def _take(self, config: Config, warn: Callable[[str], None]) -> Path | None:
        if config.checkpoint.resume == "never" and self.store.steps():
            raise UserError(
                f"checkpoint.resume=never: {self.path} has checkpoints, which a new run would overwrite; "
                "choose another output_dir, or checkpoint.resume=auto to go on"
            )
        checkpoint = self.store.newest_whole(warn)
        if checkpoint is None and config.checkpoint.resume not in ("auto", "never"):
            checkpoint = resolve(Path(config.checkpoint.resume).expanduser())
        if checkpoint is not None:
            check_agreement(config, checkpoint)
        return checkpoint

    def _check_folder(self) -> None:
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            present = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise UserError(f"output_dir={self.path}: cannot be made: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UserError(f"output_dir={self.path}: cannot be written")
        # A start that was killed early leaves dot files; a rank on a host that rank 0 was not on, its log.
        others = [name for name in present if not name.startswith(".")]
        logs = (self.path / "logs").glob("*")
        logs_alone = others == ["logs"] and all(log.match("rank-*.log") or log.match("beat-*") for log in logs)
        if others and not logs_alone and not self._is_ours():
            raise UserError(
                f"output_dir={self.path}: holds other files ({others[0]}) and is no run directory; "
                "choose a new or empty folder"
            )

    def _lock(self) -> None:
        """Two jobs in one folder would remove each other's files. The lock ends with this process, however it ends."""
        folder = os.open(self.path, os.O_RDONLY)
        self._release = weakref.finalize(self, os.close, folder)
        limit = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > limit:
                    self.release()
                    raise UserError(
                        f"output_dir={self.path}: another job is writing to it; wait for it, end it, or choose "
                        "another folder"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                return

    def release(self) -> None:
        """Lets another job have the folder; the end of this process does, too."""
        if self._release is not None:
            self._release()

    def _is_ours(self) -> bool:
        """Whether the configuration in the folder is one of hvd-train."""
        file = self.path / "config.yaml"
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            return isinstance(content, dict) and "output_dir" in content and bool(load_file(file))
        except (OSError, ValueError, yaml.YAMLError, UserError):
            return False


def check_agreement(config: Config, checkpoint: Path) -> None:
    """Raises `UserError` naming the first key that must be the same as in the checkpoint and is not."""
    wanted = flatten(config)
    # There the batch is the number of columns, which says what a stretch of rows is.
    fixed = {"training.batch_size"} if config.data.batching == "columns" else set()
    made_with = read_state(checkpoint).get("config", {})
    for key, value in made_with.items():
        if key in wanted and wanted[key] != value and (key in fixed or not may_change(key)):
            here, there = (
                yaml.safe_dump(item, default_flow_style=True).split("\n")[0] for item in (wanted[key], value)
            )
            raise UserError(
                f"{key}={here}: the checkpoint {checkpoint} was made with {key}={there}; use that value, "
                "or another output_dir for a new run"
            )
