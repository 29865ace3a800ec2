"""What keeps a job from starting for now, such as a folder that is away: the job waits, and is tried again."""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from hvd_transformer.errors import UserError
from hvd_transformer.own_folder import make_own_folder

_T = TypeVar("_T")

_LEAST_REST, _MOST_REST = 10.0, 600.0  # seconds between two tries
# Errors that do not pass: a file where a folder must be, or the reverse; a path or a command line that is too long.
# Others may: whatever file system it is, a shared one that is away has many names for that.
_FOR_GOOD = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.E2BIG}
_ANSWER_SECONDS = 3.0  # within which a folder answers
_ANSWER_SECONDS_MEANWHILE = 0.3  # while another one does not: a server that is away may have the folders of many jobs


class NotNow(UserError):
    """What a job needs cannot be had now. The job is not to blame, and is tried again."""


def error_of(error: OSError, words: str) -> UserError:
    """The error to raise for one of a file system: `NotNow`, or `UserError` for what does not pass."""
    if error.errno == errno.EEXIST and error.filename and (link := _dangling_link(Path(error.filename))) is not None:
        return NotNow(f"{link}: this symbolic link leads to a folder that does not exist")
    return UserError(words) if error.errno in _FOR_GOOD else NotNow(words)


def _dangling_link(path: Path) -> Path | None:
    """The part of a path that is a symbolic link to what is away: no folder can be made there, as the link exists."""
    for part in (path, *path.parents):
        try:
            if part.is_symlink() and not part.exists():
                return part
        except OSError:  # what it leads to cannot be reached
            return part
    return None


def check_folder(folder: str) -> None:
    """Raise `NotNow` or `UserError` if no process can start in the folder of a job."""
    try:
        os.stat(f"{folder}/.")  # noqa: PTH116  # with the dot it needs the rights that a change to the folder needs
    except OSError as error:
        raise error_of(error, f"{folder}: {error.strerror}; the job starts in this folder") from None


def check_run_folder(folder: Path) -> None:
    """Raise `NotNow`, or `UserError` like `make_own_folder`, if the run directory of a job cannot be made.

    One that is made for this is removed: a start that is refused leaves none.
    """
    try:
        is_new = not folder.exists()
        make_own_folder(folder)
        if is_new:
            folder.rmdir()
    except OSError as error:
        if error.errno in _FOR_GOOD:
            raise error_of(error, f"{folder}: {error.strerror}") from None
        raise NotNow(f"{folder.parent}: {error.strerror}; the run directory is made there") from None


class SlowFolders:
    """Looks at folders that may never answer, such as those of a network file system whose server is away.

    Each look has a thread of its own, which is left alone if it takes too long. Until it ends, no other one is started
    for the same folder. To be used from one thread.
    """

    def __init__(self) -> None:
        self._looks: dict[Path, Future[Any]] = {}  # those that have not ended

    def ask(self, folder: Path, look: Callable[[], _T]) -> _T:
        """The result of `look`, which uses files in this folder.

        Raises what it raises, and `NotNow` if the folder does not answer within a few seconds.
        """
        self._looks = {at: earlier for at, earlier in self._looks.items() if not earlier.done()}
        if folder not in self._looks:
            seconds = _ANSWER_SECONDS_MEANWHILE if self._looks else _ANSWER_SECONDS
            answer: Future[_T] = Future()
            try:
                threading.Thread(target=_answer, args=(look, answer), name="slow folder", daemon=True).start()
            except RuntimeError as error:  # there are too many threads
                raise NotNow(f"{folder}: cannot be looked at: {error}") from None
            if wait([answer], seconds).done:
                return answer.result()
            self._looks[folder] = answer
        raise NotNow(f"{folder}: does not answer")


def _answer(look: Callable[[], _T], answer: Future[_T]) -> None:
    try:
        answer.set_result(look())
    except BaseException as error:  # whoever asked gets it
        answer.set_exception(error)


def rest_seconds(tries: int) -> float:
    """How long to wait after so many tries in a row: longer and longer, at most ten minutes."""
    return min(_LEAST_REST * 2.0 ** min(tries - 1, 10), _MOST_REST)
