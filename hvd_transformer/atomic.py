"""Files that appear whole or not at all: written aside, synced, renamed.

A reader, another rank or the next start sees the old file or the new one, whatever kills the writer.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

# What file systems answer that cannot sync a folder (some network and FUSE mounts).
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


def write_text(path: Path, text: str) -> None:
    """Put `text` into `path` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Put `data` into `path`, whole or not at all. Raises OSError; `path` is then as it was before.

    The temporary file lies in the same folder, under a name that starts with a dot. Only a killed process
    leaves one behind.
    """
    # Not tempfile: its files are private (0600), these follow the umask like any other.
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
    """Make the names in `folder` (new files, renames) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
