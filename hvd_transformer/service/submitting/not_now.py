"""What keeps a job from starting for now, such as a folder that is away: the job waits, and is tried again."""

import errno
import os
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.own_folder import make_own_folder

_LEAST_REST, _MOST_REST = 10.0, 600.0  # seconds between two tries
# Errors that do not pass: a file where a folder must be, or the reverse; a path or a command line that is too long.
# Others may: whatever file system it is, a shared one that is away has many names for that.
_FOR_GOOD = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.E2BIG}


class NotNow(UserError):
    """What a job needs cannot be had now. The job is not to blame, and is tried again."""


def error_of(error: OSError, words: str) -> UserError:
    """The error to raise for one of a file system: `NotNow`, or `UserError` for what does not pass."""
    return UserError(words) if error.errno in _FOR_GOOD else NotNow(words)


def check_folder(folder: str) -> None:
    """Raise `NotNow` or `UserError` if no process can start in the folder of a job."""
    try:
        os.stat(f"{folder}/.")  # noqa: PTH116  # with the dot it needs the rights that a change to the folder needs
    except OSError as error:
        raise error_of(error, f"{folder}: {error.strerror}; the job starts in this folder") from None


def make_run_folder(folder: Path) -> None:
    """Make the run directory of a job where it is missing. Raises `NotNow`, and `UserError` like `make_own_folder`."""
    try:
        make_own_folder(folder)
    except OSError as error:
        if error.errno in _FOR_GOOD:
            raise UserError(f"{folder}: {error.strerror}") from None
        raise NotNow(f"{folder.parent}: {error.strerror}; the run directory is made there") from None


def rest_seconds(tries: int) -> float:
    """How long to wait after so many tries in a row: longer and longer, at most ten minutes."""
    return min(_LEAST_REST * 2.0 ** min(tries - 1, 10), _MOST_REST)
