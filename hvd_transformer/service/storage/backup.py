"""Copies the database as it is at one moment, also while a service uses it."""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from uuid import uuid4

from hvd_transformer.atomic import sync_folder
from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.database import Database


def back_up(database: Path, target: Path) -> None:
    """Copy the database to the file `target`, which only its owner may read, and which appears whole or not at all.

    Raises `UserError` for a database that cannot be read and a file that cannot be written.
    """
    if target.is_dir():
        raise UserError(f"{target}: is a folder; name a file")
    own = {database.with_name(f"{database.name}{ending}").resolve() for ending in ("", "-wal", "-shm", ".lock")}
    if target.resolve() in own or (target.exists() and database.exists() and target.samefile(database)):
        raise UserError(f"{target}: is the service's own database; name another file")
    source = Database(database, read_only=True)
    temporary = target.with_name(f".{uuid4().hex}.tmp")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with source.read() as connection, closing(sqlite3.connect(temporary)) as copy:
            try:
                connection.backup(copy)
            except sqlite3.OperationalError as error:
                raise UserError(f"{target}: cannot be written: {error}") from None
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        source.close()
        with suppress(OSError):
            temporary.unlink()
