"""Transactions on a real file: together, nested, killed, and on disks that are full, damaged or locked."""

import errno
import gc
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage import database as database_module
from hvd_transformer.service.storage.database import Database

KILLED = """
import os, signal, sys
from pathlib import Path
from hvd_transformer.service.storage.database import Database
database = Database(Path(sys.argv[1]))
for number in range(1000):
    with database.write() as connection:
        connection.execute("INSERT INTO usage VALUES (?, 1, 1)", (str(number),))
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = Database(path)
    yield database
    database.close()


def use(database: Database, owner: str, seconds: float = 1.0) -> None:
    with database.write() as connection:
        connection.execute("INSERT INTO usage VALUES (?, ?, 0)", (owner, seconds))


def owners(database: Database) -> list[str]:
    with database.read() as connection:
        return [row["owner"] for row in connection.execute("SELECT owner FROM usage ORDER BY owner")]


def killed(path: Path) -> list[str]:
    """The owners that a process wrote to a new database before it was killed; what it began then is not told."""
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        written = [next(process.stdout).strip() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        return written + [line.strip() for line in process.stdout if line.endswith("\n")]


def test_a_transaction_is_whole_or_not_at_all(database: Database) -> None:
    use(database, "ann")
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        connection.execute("INSERT INTO usage VALUES ('ben', 1, 0)")
        connection.execute("DELETE FROM usage WHERE owner = 'ann'")
        1 / 0  # noqa: B018
    assert owners(database) == ["ann"]
    use(database, "cid")
    assert owners(database) == ["ann", "cid"]


def test_an_inner_transaction_is_a_part_of_the_outer(database: Database) -> None:
    with database.write():
        use(database, "ann")
        with pytest.raises(ZeroDivisionError), database.write() as connection:
            connection.execute("INSERT INTO usage VALUES ('ben', 1, 0)")
            1 / 0  # noqa: B018
        use(database, "cid")
        assert owners(database) == ["ann", "cid"]
        seen = []
        reader = threading.Thread(target=lambda: seen.append(owners(database)))
        reader.start()
        reader.join()
        assert seen == [[]]
    assert owners(database) == ["ann", "cid"]
    with pytest.raises(ZeroDivisionError), database.write():
        use(database, "dan")
        1 / 0  # noqa: B018
    assert owners(database) == ["ann", "cid"]


def test_what_follows_a_commit_happens_once_and_after_it(database: Database) -> None:
    calls: list[list[str]] = []

    def call() -> None:
        calls.append(owners(database))

    with database.write():
        for owner in ("ann", "ben"):
            use(database, owner)
            database.after_commit(call)
        assert calls == []
    assert calls == [["ann", "ben"]]
    with pytest.raises(ZeroDivisionError), database.write():
        database.after_commit(call)
        1 / 0  # noqa: B018
    use(database, "cid")
    assert len(calls) == 1


def test_writers_of_many_threads_wait_for_each_other(database: Database) -> None:
    use(database, "all", 0.0)

    def add() -> None:
        for _ in range(25):
            with database.write() as connection:
                seconds = connection.execute("SELECT slot_seconds FROM usage").fetchone()[0]
                connection.execute("UPDATE usage SET slot_seconds = ?", (seconds + 1,))

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as connection:
        assert connection.execute("SELECT slot_seconds FROM usage").fetchone()[0] == 200


def test_a_reader_sees_one_state_whatever_is_written_meanwhile(database: Database) -> None:
    with database.read() as connection:
        assert connection.execute("SELECT count(*) FROM usage").fetchone()[0] == 0
        use_it = threading.Thread(target=use, args=(database, "ann"))
        use_it.start()
        use_it.join()
        assert connection.execute("SELECT count(*) FROM usage").fetchone()[0] == 0
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM usage")
    assert owners(database) == ["ann"]


def test_many_readers_at_once_leave_few_connections(database: Database) -> None:
    def connections() -> int:
        return sum(type(item) is sqlite3.Connection for item in gc.get_objects())

    gc.collect()  # what other tests left is not to go meanwhile
    before, together = connections(), threading.Barrier(20)
    most = []

    def look() -> None:
        with database.read() as connection:
            connection.execute("SELECT count(*) FROM usage").fetchone()
            together.wait()
            most.append(connections())
            together.wait()

    threads = [threading.Thread(target=look) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) >= before + 20
    assert connections() <= before + 4
    database.close()
    assert connections() < before


def test_only_what_can_be_lost_is_not_synced(database: Database) -> None:
    full, normal = 2, 1
    for durable, mode in ((True, full), (False, normal), (True, full)):
        with database.write(durable) as connection:
            assert connection.execute("PRAGMA synchronous").fetchone()[0] == mode
    with database.read() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_what_was_written_outlives_a_kill(path: Path) -> None:
    written = killed(path)
    with closing(Database(path)) as database:
        found = owners(database)
    assert set(written) <= set(found) and len(found) <= len(written) + 1
    assert len(written) >= 20


def test_the_files_are_private(database: Database, path: Path) -> None:
    use(database, "ann")
    assert {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == dict.fromkeys(
        ("service.db", "service.db-wal", "service.db-shm", "service.db.lock"), 0o600
    )


def test_looking_at_a_closed_database_writes_nothing(path: Path) -> None:
    with closing(Database(path)) as database:
        use(database, "ann")

    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.parent.iterdir()}

    before = files()
    assert sorted(before) == ["service.db", "service.db.lock"]
    with closing(Database(path, read_only=True)) as database:
        assert owners(database) == ["ann"]
        with pytest.raises(UserError, match="service.db: opened for reading only$"):
            use(database, "ben")
    assert files() == before


def test_looking_beside_a_service_and_after_its_kill(path: Path) -> None:
    with closing(Database(path)) as service, closing(Database(path, read_only=True)) as other:
        use(service, "ann")
        assert owners(other) == ["ann"]
        use(service, "ben")
        assert owners(other) == ["ann", "ben"]
    path.unlink()
    written, before = killed(path), path.read_bytes()
    with closing(Database(path, read_only=True)) as other:
        assert set(written) <= set(owners(other))
    assert path.read_bytes() == before


def test_a_service_that_starts_while_somebody_looks_is_noticed(path: Path) -> None:
    Database(path).close()
    with closing(Database(path, read_only=True)) as other:
        expected = pytest.raises(UserError, match="service has just started to use it; try again$")
        with expected, other.read(), closing(Database(path)) as service:
            use(service, "ann")
        assert owners(other) == ["ann"]


def test_looking_at_nothing(path: Path) -> None:
    with pytest.raises(UserError, match=f"^{path}: no such file; start hvd-transformer serve"):
        Database(path, read_only=True)
    path.touch()
    with pytest.raises(UserError, match=f"^{path}: is of an earlier release; start hvd-transformer serve"):
        Database(path, read_only=True)
    with pytest.raises(UserError, match="gone/service.db.lock: cannot be written: No such file or directory"):
        Database(path.parent / "gone" / "service.db")


def test_a_file_of_something_else_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"diary " * 1000)
    for read_only in (False, True):
        with pytest.raises(UserError, match=f"^{path}: it is no SQLite database; move it away"):
            Database(path, read_only)
    assert path.read_bytes() == b"diary " * 1000
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (address)")
    for read_only in (False, True):
        with pytest.raises(UserError, match=f"^{path}: is the database of another program; choose another folder"):
            Database(path, read_only)


def test_a_damaged_database_is_refused_in_one_line(path: Path) -> None:
    with closing(Database(path)) as database, database.write():
        for number in range(3000):
            use(database, f"owner {number}")
    whole = path.read_bytes()
    page = whole.index(b"owner 1500") // 4096
    path.write_bytes(whole[: page * 4096] + os.urandom(4096) + whole[(page + 1) * 4096 :])
    with pytest.raises(
        UserError, match=f"^{path}: it is damaged; move it away and put a backup in its place"
    ) as raised:
        Database(path)
    assert "\n" not in str(raised.value)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"^{path}: it is damaged"):
        Database(path)
    path.write_bytes(whole)
    with closing(Database(path)) as database:
        assert len(owners(database)) == 3000


def test_a_database_that_another_program_locks(database: Database, path: Path) -> None:
    with database.write() as connection:
        connection.execute("PRAGMA busy_timeout = 50")
    with closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(UserError, match=f"^{path}: another program has it locked; end that program"):
            use(database, "ann")
        assert owners(database) == []
        shell.execute("ROLLBACK")
    use(database, "ann")
    assert owners(database) == ["ann"]


@contextmanager
def full_disk(database: Database, path: Path) -> Iterator[None]:
    """No file may grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name("service.db-wal").stat().st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def most_pages(database: Database, path: Path) -> Iterator[None]:
    """SQLite's own limit, which it reports like a disk without space."""
    with database.write() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    yield
    with database.write() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")


@pytest.mark.parametrize(
    ("full", "line"),
    [(full_disk, "the disk does not read or write"), (most_pages, "the disk is full; free some space")],
)
def test_a_full_disk_loses_nothing_and_the_next_write_works(
    database: Database, path: Path, full: object, line: str
) -> None:
    assert callable(full)
    use(database, "ann")
    with full(database, path):
        for owner in ("ben" * 10_000, "cid" * 10_000):
            with pytest.raises(UserError, match=f"^{path}: {line}"):
                use(database, owner)
        with pytest.raises(UserError, match=f"^{path}: {line}"), database.write():
            use(database, "dan")
            use(database, "eve" * 10_000)
        assert owners(database) == ["ann"]
    use(database, "fay")
    assert owners(database) == ["ann", "fay"]


def test_a_file_system_without_shared_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a database in memory, which cannot have a WAL."""

    def connect(*words: object, **options: object) -> sqlite3.Connection:
        return sqlite3.Connection(":memory:", isolation_level=None)

    monkeypatch.setattr(database_module.sqlite3, "connect", connect)
    with pytest.raises(
        UserError, match=f"^{path}: its file system has no shared memory; choose a folder on a local disk"
    ):
        Database(path)


def test_errors_of_the_system_are_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk without room for a further file."""

    os_open = os.open

    def full(file: Path, *options: int) -> int:
        if file == path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os_open(file, *options)

    monkeypatch.setattr(database_module.os, "open", full)
    with pytest.raises(UserError, match=f"^{path}: No space left on device; put that right, or choose another folder"):
        Database(path)
    monkeypatch.undo()
    Database(path).close()
