"""Builds a folder once, whichever of several processes comes first: a lock, work aside, then a rename."""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from hvd_transformer.atomic import sync_folder
from hvd_transformer.errors import UserError

T = TypeVar("T")
Report = Callable[[str], None]
ShouldStop = Callable[[], bool]

POLL_SECONDS = 0.2
# What a user can put right. Anything else keeps its traceback.
_USER_ERRNOS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Stopped(Exception):
    """`should_stop` said so; nothing half-written is left under a final name."""


def silent(message: str) -> None:
    """Reports nothing."""


def never() -> bool:
    """Never asks to stop."""
    return False


def build_once(
    folder: Path,
    load: Callable[[Path], T | None],
    build: Callable[[Path], None],
    should_stop: ShouldStop = never,
) -> T:
    """`load(folder)`, after `build(aside)` where that gave None (missing or damaged).

    One process builds, the others sleep and then load. Where the builder fails with a `UserError`, those that
    waited raise the same; where it dies, the next one starts again and removes what was left.
    Raises `UserError` and `Stopped`.
    """
    try:
        found = load(folder)
        if found is not None:
            return found
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), should_stop) as (lock_file, error):
            found = load(folder)
            if found is not None:
                return found
            if error is not None:
                raise UserError(error)
            with _failure_noted(lock_file):
                _build_aside(folder, build)
            found = load(folder)
    except OSError as error:
        if error.errno not in _USER_ERRNOS:
            raise
        raise UserError(_explain(error, folder)) from None
    assert found is not None, f"{folder} is not whole although it was just built"
    return found


def _build_aside(folder: Path, build: Callable[[Path], None]) -> None:
    aside = folder.with_name(f".{folder.name}.tmp")
    if aside.exists():  # of a process that died: the lock is ours
        shutil.rmtree(aside)
    aside.mkdir()
    try:
        build(aside)
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(aside)
        if folder.exists():  # damaged
            damaged = folder.rename(aside / "damaged")
            shutil.rmtree(damaged)
        aside.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path, should_stop: ShouldStop) -> Iterator[tuple[IO[str], str | None]]:
    """Holds the lock; gives its file, and the error of a builder that failed while we waited.

    The file stays: another process may already wait for it, and would hold a lock on a removed file.
    """
    with path.open("a+", encoding="utf-8") as file:
        failures_before = _read_failure(file)[0]
        while not _try_lock(file):
            if should_stop():
                raise Stopped
            time.sleep(POLL_SECONDS)
        failures, error = _read_failure(file)
        yield file, error if failures > failures_before else None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise UserError(f"{file.name}: its file system has no file locks; choose another data.cache_dir") from None
        raise
    return True


def _read_failure(file: IO[str]) -> tuple[int, str | None]:
    file.seek(0)
    try:
        record: Any = json.loads(file.read())
        return int(record["failures"]), str(record["error"])
    except (ValueError, KeyError, TypeError):  # new, or its writer was killed
        return 0, None


@contextmanager
def _failure_noted(lock_file: IO[str]) -> Iterator[None]:
    """Leaves a builder's `UserError` in the lock file for those that wait."""
    try:
        yield
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _USER_ERRNOS:
            raise
        message = str(error) if isinstance(error, UserError) else _explain(error, Path(lock_file.name))
        failures = _read_failure(lock_file)[0] + 1
        try:
            lock_file.truncate(0)
            lock_file.write(json.dumps({"failures": failures, "error": message}))
            lock_file.flush()
        except OSError:  # full disk: those that wait find out themselves
            pass
        raise UserError(message) from None


def _explain(error: OSError, place: Path) -> str:
    path, cache = Path(error.filename or place), place.parent
    if path != cache and path not in cache.parents and cache not in path.parents:
        return f"{path}: {error.strerror}"
    return f"{path}: {error.strerror}; data.cache_dir must be a folder to write to, with room"
