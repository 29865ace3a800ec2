"""A private file with the values of --env variables, NAME=VALUE lines: read when a job starts, and never kept."""

import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting.not_now import error_of

_MAX_BYTES = 1 << 20
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def read_values(file: Path, names: Sequence[str], owners: Collection[int]) -> dict[str, str]:
    """The values of the variables `names`, each up to the end of its line; lines that begin with # are comments.

    Raises `UserError`, which never shows a value, if the file lacks one, if others than its owner may read it, or if
    its owner is none of the users `owners`; and `NotNow`, which is one, if it is away.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(_private_text(file, owners).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise UserError(f"--env-file {file}, line {number}: not of the form NAME=VALUE")
        values[found[1]] = found[2]
    for name in names:
        if name not in values:
            raise UserError(f"--env {name}: not in {file}")
    return {name: values[name] for name in names}


def _private_text(file: Path, owners: Collection[int]) -> str:
    try:
        with open(file, "rb", opener=_without_waiting) as stream:  # noqa: PTH123
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"--env-file {file}: not a file")
            if status.st_uid not in owners:
                raise UserError(f"--env-file {file}: belongs to another user")
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError(f"--env-file {file}: others may read or write it; use: chmod 600 {file}")
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise error_of(error, f"--env-file {file}: cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise UserError(f"--env-file {file}: larger than 1 MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(f"--env-file {file}: not valid UTF-8") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a named pipe, too, that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)
