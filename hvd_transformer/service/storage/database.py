"""The service's SQLite file: one writer, readers beside it, and every fault of the disk in words.

A transaction that fails is rolled back, and the next one works as soon as its cause is gone.
"""

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.database_owner import DatabaseOwner
from hvd_transformer.service.storage.migrations import MIGRATIONS, check_version, migrate

_UNDO_PART = ("ROLLBACK TO part", "RELEASE part")
_BUSY_SECONDS = 5.0
_IDLE_READERS = 4  # kept for the next reads: a thread pool of 40 would otherwise keep 40 caches
_READER_CACHE = 512  # KiB; the kernel has the file in its own cache
_WAL_BYTES = 16 * 1024**2  # what the WAL shrinks to after a large transaction

# Parts of SQLite's messages, and what they mean for the user. Python 3.10 does not tell the number of an error.
_FAULTS = (
    ("is full", "the disk is full; free some space: what is stored is intact, and the service then goes on"),
    ("disk I/O error", "the disk does not read or write (see dmesg); check it and its free space"),
    ("locked", "another program has it locked; end that program, such as a sqlite3 shell"),
    ("malformed", "it is damaged; move it away and put a backup in its place, or choose another folder with --state"),
    ("not a database", "it is no SQLite database; move it away, or choose another folder with --state"),
    ("readonly", "it cannot be written; make it and its folder yours, or choose another folder with --state"),
    ("unable to open", "it cannot be opened; check the rights of it and its folder, or choose another with --state"),
)


class Database:
    """The file `path`, made where it is missing. `read_only`: only looks, also while a service has the database.

    Thread-safe. Raises `UserError`, in a line that names the file, for all that is wrong with it or its disk.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self._wal = path.with_name(f"{path.name}-wal")
        self._turn = threading.RLock()
        self._writing: int | None = None  # the thread in `write`
        self._after_commit: dict[Callable[[], object], None] = {}
        self._idle: deque[sqlite3.Connection] = deque()
        self._closed = False
        self._owner: DatabaseOwner | None = None
        self._writer: sqlite3.Connection | None = None
        try:
            if read_only:
                self._check_readable()
            else:
                self._owner = DatabaseOwner(path)
                with self._faults():
                    self._writer = self._open_writer()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise UserError(
                    f"{path}: {error.strerror}; put that right, or choose another folder with --state"
                ) from error
            raise

    @contextmanager
    def write(self, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction, rolled back if the block raises. Inside one of the same thread it is a part of that one.

        `durable`: on the disk when the block is left. Otherwise a power failure, but not a crash, may lose it.
        """
        with self._turn, self._faults():
            if self._writer is None:
                raise UserError(f"{self.path}: opened for reading only")
            if self._writing is not None:
                with self._transaction(self._writer, "SAVEPOINT part", "RELEASE part", *_UNDO_PART):
                    yield self._writer
                return
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._writing = threading.get_ident()
            try:
                with self._transaction(self._writer, "BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
                    yield self._writer
                done = list(self._after_commit)
            finally:
                self._writing = None
                self._after_commit.clear()
        for call in done:
            call()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A view of the database as it is now, or, inside `write`, as that has made it."""
        if self._writer is not None and self._writing == threading.get_ident():
            yield self._writer
            return
        with self._faults():
            if self._owner is None:
                with self._look() as reader:
                    yield reader
                return
            reader = self._take_reader()
            try:
                with self._transaction(reader, "BEGIN", "COMMIT", "ROLLBACK"):
                    yield reader
            finally:
                self._idle.append(reader)
                if self._closed or len(self._idle) > _IDLE_READERS:
                    self._idle.pop().close()

    def after_commit(self, call: Callable[[], object]) -> None:
        """Within `write`: `call` once, if it is committed. Outside: at once."""
        if self._writing == threading.get_ident():
            self._after_commit[call] = None
        else:
            call()

    def close(self) -> None:
        """Close it, and let another service have it."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        with self._turn:
            if self._writer is not None:
                with suppress(sqlite3.Error):  # its last copy of the WAL into the file; the next start does it
                    self._writer.close()
                self._writer = None
            if self._owner is not None:
                self._owner.release()
                self._owner = None

    def _open_writer(self) -> sqlite3.Connection:
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))  # SQLite gives its other files the same rights
        writer = self._connect("mode=rw")
        try:
            problem = writer.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(f"malformed: {problem.removeprefix('*** in database main ***')}")
            check_version(writer, self.path)
            if writer.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise UserError(
                    f"{self.path}: its file system has no shared memory; choose a folder on a local disk with --state"
                )
            writer.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            migrate(writer, self.path)
            writer.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            writer.close()
            raise
        return writer

    def _check_readable(self) -> None:
        if not self.path.is_file():
            raise UserError(f"{self.path}: no such file; start hvd-transformer serve, or name its folder with --state")
        with self.read() as connection:
            version = check_version(connection, self.path)
        if version < len(MIGRATIONS):
            raise UserError(f"{self.path}: is of an earlier release; start hvd-transformer serve, which converts it")

    def _take_reader(self) -> sqlite3.Connection:
        with suppress(IndexError):
            return self._idle.pop()
        reader = self._connect("mode=ro")
        reader.execute(f"PRAGMA cache_size = -{_READER_CACHE}")
        return reader

    @contextmanager
    def _look(self) -> Iterator[sqlite3.Connection]:
        """Read as somebody else than the service.

        To read a database that was closed properly, SQLite makes files beside it, unless nobody is said to write to it.
        """
        closed, before = not self._wal.exists(), self.path.stat()
        with closing(self._connect("immutable=1" if closed else "mode=ro")) as reader:
            with self._transaction(reader, "BEGIN", "COMMIT", "ROLLBACK"):
                yield reader
            if closed and self.path.stat().st_mtime_ns != before.st_mtime_ns:
                raise UserError(f"{self.path}: a service has just started to use it; try again")

    def _connect(self, options: str) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?{options}"
        connection = sqlite3.connect(
            uri, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=True
        )
        connection.row_factory = sqlite3.Row
        return connection

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection, begin: str, commit: str, *rollback: str) -> Iterator[None]:
        connection.execute(begin)
        try:
            yield
            connection.execute(commit)
        except BaseException:
            if connection.in_transaction:  # SQLite rolls some errors back itself
                for statement in rollback:
                    connection.execute(statement)
            raise

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            for part, meaning in _FAULTS:
                if part in str(error):
                    raise UserError(f"{self.path}: {meaning} ({' '.join(str(error).split())})") from error
            raise
