"""Makes folders that no other user has made first, as anybody can do in /tmp."""

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from hvd_transformer.errors import UserError

_EVERYONE = stat.S_ISVTX | stat.S_IWOTH  # as /tmp has: names of everyone, which only their owners can replace


def make_own_folder(folder: Path) -> None:
    """Make the folder and its parents where they are missing.

    Raises `UserError` like `check_own`, and `OSError`.
    """
    check_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_own(folder)  # another user may just have been faster; from now on nobody can be


def check_own(path: Path) -> None:
    """Raise `UserError` if another user made the path, or a part of it, in a folder like /tmp.

    It could lead anywhere, or its owner could change what is written there. In other folders it is up to their rights
    who works together there. Root's are used, too, and those that a group of this user shares.
    """
    try:
        resolved = path.resolve()
    except RuntimeError:  # before Python 3.13
        raise UserError(f"{path}: leads into a loop of symbolic links") from None
    for whole in dict.fromkeys((path.absolute(), resolved)):
        for part in reversed((whole, *whole.parents)):
            with suppress(FileNotFoundError, NotADirectoryError):
                if part.parent.stat().st_mode & _EVERYONE == _EVERYONE and part != part.parent:
                    _check_owner(path, part)


def _check_owner(path: Path, part: Path) -> None:
    status = part.lstat()
    if status.st_uid not in (0, os.geteuid()) and not _is_of_group(status):
        raise UserError(
            f"{path}: {part} belongs to user {user_name(status.st_uid)}, in a folder where everyone can write; "
            "use a folder of your own"
        )


def _is_of_group(status: os.stat_result) -> bool:
    """Whether it is a folder in which a group of this user works together, and nobody else can write.

    Not the first group, which may be everybody's, such as "users".
    """
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    groups = set(os.getgroups()) - {os.getegid()}
    return stat.S_ISDIR(status.st_mode) and writers == stat.S_IWGRP and status.st_gid in groups


def user_name(user: int) -> str:
    """The name of the user with this number; one without a name is called by the number."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
