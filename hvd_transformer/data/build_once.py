"""Build a folder exactly once although several processes ask for it: file locks, temporary folder, atomic rename.

Processes of a host wait for each other by a lock of the kernel. On some network file systems other hosts do not see it,
so whoever builds takes a `FolderLock`, too.

A build that keeps the file `PROGRESS` in its folder finds all its files again after a kill, a stop or an error.
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from hvd_transformer.atomic import sync_folder
from hvd_transformer.errors import UserError
from hvd_transformer.folder_lock import FolderLock, owner_of
from hvd_transformer.own_folder import check_own, make_own_folder

T = TypeVar("T")
ShouldStop = Callable[[], bool]

PROGRESS, PLACES = "progress.json", "places.json"
_DAMAGED = "damaged"  # what the new folder replaces
POLL_SECONDS = 0.2
# Errors that a user can fix. Any other error keeps its traceback.
_USER_ERRNOS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,  # a file of the source that was removed meanwhile
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Stopped(Exception):
    """`should_stop` returned True; no incomplete folder is left under its final name."""


class PrepareContext(NamedTuple):
    """What preparing data may use: a map over worker processes, an output for messages, and a request to stop.

    `map` is the builtin, or one that works on several items at once and yields the results in order.
    """

    map: Callable[..., Iterator[Any]] = map
    report: Callable[[str], None] = lambda message: None
    should_stop: ShouldStop = lambda: False

    @property
    def thread_map(self) -> Callable[..., Iterator[Any]]:
        """`map`, over threads where that is over local processes: for functions that compute without Python's lock."""
        in_threads: Callable[..., Iterator[Any]] = getattr(self.map, "in_threads", self.map)
        return in_threads


ALONE = PrepareContext()  # in this process, silently, to the end


def build_once(
    folder: Path,
    load: Callable[[Path], T | None],
    build: Callable[[Path], None],
    should_stop: ShouldStop = lambda: False,
    report: Callable[[str], object] = lambda line: None,
) -> T:
    """Return `load(folder)`; if that is None (missing or damaged), call `build(aside)` first.

    One process builds; the others wait and then load. If the builder fails with a `UserError`, the waiting processes
    raise the same error; if it dies, the next process removes its leftovers, unless they have `PROGRESS`, and builds.
    `report` is told, in a line, of a wait for another host. Raises `UserError`, also for a place that another user has
    prepared (`own_folder.py`), and `Stopped`.
    """
    try:
        check_own(folder)
        if (found := load(folder)) is not None:
            return found
        make_own_folder(folder.parent)
        with _locked(folder.with_name(f"{folder.name}.lock"), should_stop) as (lock_file, error):
            if (found := load(folder)) is not None:
                return found
            if error is not None:
                raise UserError(error)
            with _alone(folder, lock_file, should_stop, report) as builder:
                if (found := load(folder)) is not None:  # another host has built it
                    return found
                _build_aside(folder, build, lock_file, builder)
            found = load(folder)
    except OSError as error:
        raise UserError(_explain(error, folder)) from None
    assert found is not None, f"{folder} is incomplete although it was just built"
    return found


@contextmanager
def _alone(
    folder: Path, lock_file: IO[str], should_stop: ShouldStop, report: Callable[[str], object]
) -> Iterator[FolderLock]:
    """Hold the folder's lock among hosts, too. Raises the error of a builder on another one that failed meanwhile."""

    def look() -> None:
        if should_stop():
            raise Stopped

    failures_before = _read_failure(lock_file)[0]
    builder = FolderLock(_builder(folder), "a preparation of data")
    check_own(_builder(folder))
    builder.take(report, look=look)
    try:
        failures, error = _read_failure(lock_file)
        if error is not None and failures > failures_before:
            raise UserError(error)
        yield builder
    finally:
        builder.release()


def _builder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.builder")


def _replaced(folder: Path) -> str:
    """The message of a builder that was suspended for so long that another one took over."""
    return f"{folder}: prepared by another host at the same time; start again"


def _build_aside(folder: Path, build: Callable[[Path], None], lock_file: IO[str], builder: FolderLock) -> None:
    """Build in a temporary folder, then rename it. An error of the user is recorded in the lock file for the waiting
    processes."""
    aside = folder.with_name(f".{folder.name}.tmp")
    try:
        check_own(aside)
        if aside.is_symlink():
            aside.unlink()
        elif not (aside / PROGRESS).is_file() and aside.exists():  # left by a process that died: we hold the lock
            shutil.rmtree(aside)
        aside.mkdir(exist_ok=True)
        if (aside / _DAMAGED).exists():  # killed while it was removed
            shutil.rmtree(aside / _DAMAGED)
        build(aside)
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(aside)
        if builder.lost:
            raise UserError(_replaced(folder))
        if folder.exists():  # damaged
            shutil.rmtree(folder.rename(aside / _DAMAGED))
        aside.rename(folder)
        for name in (PROGRESS, PLACES):
            (folder / name).unlink(missing_ok=True)
        sync_folder(folder.parent)
    except (UserError, OSError) as error:
        if builder.lost:  # whatever became of its files
            message = _replaced(folder)
        else:
            message = str(error) if isinstance(error, UserError) else _explain(error, Path(lock_file.name))
        failures = _read_failure(lock_file)[0] + 1
        with suppress(OSError):  # full disk: the waiting processes will notice themselves
            lock_file.truncate(0)
            lock_file.write(json.dumps({"failures": failures, "error": message}))
            lock_file.flush()
        raise UserError(message) from None
    finally:
        if not builder.lost and not (aside / PROGRESS).is_file():
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path, should_stop: ShouldStop) -> Iterator[tuple[IO[str], str | None]]:
    """Hold the lock; yield its file, and the error of a builder that failed while we waited.

    The file is never removed: another process may already wait for it, and would then lock a deleted file.
    """
    check_own(path)
    with open(path, "a+", encoding="utf-8", opener=_open_no_link) as file:  # noqa: PTH123
        failures_before = _read_failure(file)[0]
        while not _try_lock(file):
            if should_stop():
                raise Stopped
            time.sleep(POLL_SECONDS)
        failures, error = _read_failure(file)
        yield file, error if failures > failures_before else None


@contextmanager
def unclaimed(aside: Path) -> Iterator[bool]:
    """Whether nobody builds in this temporary folder; then nobody does in the context. Raises `UserError` and
    `OSError`."""
    folder = aside.with_name(aside.name.removeprefix(".").removesuffix(".tmp"))
    lock = folder.with_name(f"{folder.name}.lock")
    for path in (aside, lock):
        check_own(path)
    with open(lock, "a+", encoding="utf-8", opener=_open_no_link) as file:  # noqa: PTH123
        yield _try_lock(file) and owner_of(_builder(folder)) is None


def _open_no_link(path: str, flags: int) -> int:
    """Raises `UserError` for a symbolic link: the lock file is written, and it may lead to any other file."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path}: is a symbolic link; remove it, or choose another data.cache_dir") from None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise UserError(
            f"{file.name}: its file system does not support file locks; choose another data.cache_dir"
        ) from None


def _read_failure(file: IO[str]) -> tuple[int, str | None]:
    file.seek(0)
    try:
        record: Any = json.loads(file.read())
        return int(record["failures"]), str(record["error"])
    except (ValueError, KeyError, TypeError):  # a new file, or its writer was killed
        return 0, None


def _explain(error: OSError, place: Path) -> str:
    """The message for the user. Re-raises an error that the user cannot fix."""
    if error.errno not in _USER_ERRNOS:
        raise error
    path, cache = Path(error.filename or place), place.parent
    if path != cache and path not in cache.parents and cache not in path.parents:
        return f"{path}: {error.strerror}"
    return f"{path}: {error.strerror}; data.cache_dir must be a writable folder with free space"
