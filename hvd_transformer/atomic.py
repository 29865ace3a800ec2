"""Atomic file writes: to a temporary file, which is synced and renamed.

A reader, another rank or the next start sees either the old file or the new one, even if the writer is killed.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

# Errors of file systems that cannot sync a folder (some network and FUSE mounts), and of a folder that may not be read.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically. Raises `OSError` like `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, atomically. Raises `OSError`, and then leaves `path` as it was.

    The temporary file is in the same folder, with a name that starts with a dot. Only a killed process leaves one
    behind.
    """
    # Not `tempfile`, whose files are private (0600): these follow the umask.
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new and renamed files in it survive a power failure."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
